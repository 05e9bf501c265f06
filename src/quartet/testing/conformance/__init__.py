"""Conformance suites: what a server of each room must do, checked over the wire.

Each suite is a tuple of checks, functions that take a subject (an address and what it can be asked)
and raise `Violation`. They know the contract and nothing of who implements it, so they grade
servers in other languages as well. To add a check: a function, and a line in its suite.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from quartet.errors import QuartetError

Subject = TypeVar("Subject")


class Violation(AssertionError):
    """The server does not keep to the contract; says in what."""


class Skipped(Exception):
    """The check cannot be made of this server; says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """Outcome of one check."""

    name: str
    outcome: Literal["passed", "failed", "skipped"]
    rule: str
    """What was checked, in one sentence."""
    message: str = ""
    """Why it failed or was skipped."""
    advice: str = ""
    """What a failure does to a run."""


def require(condition: object, message: str) -> None:
    """Raise Violation unless `condition` holds."""
    if not condition:
        raise Violation(message)


async def run_checks(
    checks: Sequence[Callable[[Subject], Awaitable[None]]], subject: Subject
) -> list[CheckResult]:
    """Run all checks, one after the other, whatever becomes of each."""
    return [await _run_check(check, subject) for check in checks]


async def _run_check(check: Callable[[Subject], Awaitable[None]], subject: Subject) -> CheckResult:
    name, rule = check.__name__, rule_of(check)
    try:
        await check(subject)
    except Skipped as reason:
        return CheckResult(name=name, outcome="skipped", rule=rule, message=str(reason))
    except (Violation, QuartetError, TimeoutError) as error:
        message = str(error) or type(error).__name__
        return CheckResult(
            name=name, outcome="failed", rule=rule, message=message, advice=advice_of(check)
        )
    return CheckResult(name=name, outcome="passed", rule=rule)


def rule_of(check: Callable[..., object]) -> str:
    """What a check looks for: the first line of its docstring."""
    return (check.__doc__ or "").strip().splitlines()[0]


def advice_of(check: Callable[..., object]) -> str:
    """What a failure does to a run: the rest of its docstring, after "Failing:"."""
    _, _, text = (check.__doc__ or "").partition("Failing:")
    return " ".join(text.split())

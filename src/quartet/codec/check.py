"""Checks that every decoder shares. Each failure is a RequestError that names the field."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from quartet.errors import RequestError


class HasRequestId(Protocol):
    """Any message with a request_id."""

    request_id: str


def invalid(field: str, value: object, problem: str, remedy: str = "") -> RequestError:
    """The error for a value that cannot be taken; `problem` follows the field's name."""
    text = str(value)
    return RequestError(
        f"{field} {problem}",
        reason="INVALID_FIELD",
        field=field,
        value=text if len(text) <= 200 else text[:200] + "...",
        remedy=remedy,
    )


def at_least(low: float, value: float, field: str) -> None:
    """Refuse a number below `low`, and a NaN."""
    if not value >= low:
        raise invalid(field, value, f"is {value}, below {low}")


def finite(value: float, field: str) -> float:
    """Refuse infinities and NaN."""
    if not math.isfinite(value):
        raise invalid(field, value, f"is {value}, not a finite number")
    return value


def present(text: str, field: str) -> str:
    """Refuse an empty name."""
    if not text:
        raise invalid(field, text, "is empty")
    return text


def one_each(values: Sequence[object], count: int, field: str, of: str) -> None:
    """Refuse a list that has neither no element nor one for each of `count` things."""
    if len(values) not in (0, count):
        raise invalid(field, len(values), f"has {len(values)} elements for {count} {of}")


def distinct(values: Sequence[str], field: str) -> None:
    """Refuse a list that has a name twice."""
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise invalid(field, value, f"has {value!r} twice")
        seen.add(value)


def decode_request_id(message: HasRequestId) -> str:
    """The request_id of any request that has one; it is never empty."""
    return present(message.request_id, "request_id")

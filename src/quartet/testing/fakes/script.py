"""What a fake is told to do wrong, and what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """One call that a fake took."""

    method: str
    """Name of the remote procedure, for example "Generate"."""
    request: Any
    """The decoded request; of a stream, the list of its parts."""


@dataclass(slots=True)
class _Failure:
    error: Exception
    after: int
    times: int | None


class Script:
    """Failures and delays of one fake, by method name, and the record of its calls.

    Example:
        >>> fake.script.fail("Score", UnavailableError("gone"), after=2, times=1)
        >>> gate = fake.script.hold("Generate")  # calls wait here ...
        >>> gate.set()                           # ... until now
    """

    def __init__(self) -> None:
        self.calls: list[Recorded] = []
        """Every call in order of arrival, those that fail included."""
        self.cancelled: list[str] = []
        """Methods whose call was cancelled while it was held."""
        self._failures: dict[str, list[_Failure]] = {}
        self._gates: dict[str, asyncio.Event] = {}
        self._changed = asyncio.Event()

    def fail(
        self, method: str, error: Exception, *, after: int = 0, times: int | None = None
    ) -> None:
        """Make `method` raise.

        Args:
            method: name of the remote procedure.
            error: what to raise: one of quartet.errors, or anything for a bug.
            after: calls that succeed first, counted from now.
            times: calls that fail then; None is all.
        """
        self._failures.setdefault(method, []).append(_Failure(error, after, times))

    def heal(self, method: str) -> None:
        """Forget the failures of `method`."""
        self._failures.pop(method, None)

    def hold(self, method: str) -> asyncio.Event:
        """Make calls of `method` wait until the returned event is set."""
        return self._gates.setdefault(method, asyncio.Event())

    def count(self, method: str) -> int:
        """How many calls of `method` arrived."""
        return sum(call.method == method for call in self.calls)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds; it is looked at whenever a call arrives or is cancelled.

        Example:
            >>> await fake.script.until(lambda: fake.script.count("Score") == 2)
        """
        while not condition():
            await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def enter(self, method: str, request: Any) -> None:
        """Record a call, wait where it is held, fail where it shall."""
        self.calls.append(Recorded(method=method, request=request))
        self._notify()
        if method in self._gates:
            try:
                await self._gates[method].wait()
            except asyncio.CancelledError:
                self.cancelled.append(method)
                self._notify()
                raise
        for failure in self._failures.get(method, ()):
            if failure.after > 0:
                failure.after -= 1
            elif failure.times is None or failure.times > 0:
                if failure.times is not None:
                    failure.times -= 1
                raise failure.error

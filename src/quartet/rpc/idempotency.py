"""One answer for one request_id, however often it is asked.

A repeat gets the first answer; a repeat while the first is at work waits for it. Failures are not
kept: the next repeat tries again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


@dataclass(slots=True)
class _Flight(Generic[Answer]):
    """Work under way and how many callers wait for it."""

    task: asyncio.Task[Answer]
    waiters: int = field(default=0)


class IdempotencyCache(Generic[Answer]):
    """Remembers the answers of the last calls of one method.

    Args:
        max_entries: answers kept; the one not asked for longest goes first.
        stop_with_callers: cancel the work when its last caller has gone. False for work that must
            not stop half-way, such as an optimizer step: it goes on, and its answer is kept.
    """

    def __init__(self, max_entries: int = 256, *, stop_with_callers: bool = True) -> None:
        if max_entries < 1:
            raise ValueError(f"max_entries is {max_entries}, below 1")
        self._max_entries = max_entries
        self._stop_with_callers = stop_with_callers
        self._answers: OrderedDict[str, Answer] = OrderedDict()
        self._flights: dict[str, _Flight[Answer]] = {}

    def __len__(self) -> int:
        """Answers kept."""
        return len(self._answers)

    async def run(self, request_id: str, work: Callable[[], Awaitable[Answer]]) -> Answer:
        """The answer to `request_id`: the kept one, the one under way, or that of `work` now."""
        if request_id in self._answers:
            self._answers.move_to_end(request_id)
            return self._answers[request_id]
        flight = self._flights.get(request_id)
        if flight is None:
            flight = _Flight(asyncio.ensure_future(self._work(request_id, work)))
            self._flights[request_id] = flight
        flight.waiters += 1
        try:
            # Shielded: one caller that goes away must not take the others' answer.
            return await asyncio.shield(flight.task)
        finally:
            flight.waiters -= 1
            if flight.waiters == 0 and self._stop_with_callers and not flight.task.done():
                # Forgotten at once: a repeat that comes now begins anew.
                self._flights.pop(request_id, None)
                flight.task.cancel()

    async def _work(self, request_id: str, work: Callable[[], Awaitable[Answer]]) -> Answer:
        try:
            answer = await work()
        finally:
            flight = self._flights.get(request_id)
            if flight is not None and flight.task is asyncio.current_task():
                del self._flights[request_id]
        self._answers[request_id] = answer
        while len(self._answers) > self._max_entries:
            self._answers.popitem(last=False)
        return answer

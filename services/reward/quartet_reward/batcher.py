"""Micro-batches across callers.

Items of all calls wait in one queue. While the scorer is idle an item starts at once; while it is
busy, items gather, and the next batch is cut from all that wait. The oldest item is always in the
next batch, so none starves; its companions are those nearest to it in length, so little is padded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from quartet.errors import DataError, QuartetError, UnavailableError
from quartet.types import Failure
from quartet_reward.scorer import Job, Outcome

logger = logging.getLogger(__name__)

MAX_WAITING = 65_536
"""Items that may wait. Beyond it calls are refused, which tells the caller to slow down."""

_WINDOW = 2048
"""Oldest items among which companions are looked for: enough to find equals, cheap to sort."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    job: Job
    outcome: asyncio.Future[Outcome]


class Batcher:
    """Feeds one scorer from many calls. Lives on one event loop."""

    def __init__(
        self,
        score: Callable[[Sequence[Job]], Awaitable[list[Outcome]]],
        *,
        max_batches: int = 1,
        max_items: int = 1,
        max_cost: int = 0,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        """Wrap `score`.

        Args:
            score: the scorer's method; at most `max_batches` calls run at once.
            max_batches: batches in work at once.
            max_items: most items of a batch.
            max_cost: most padded cost of a batch, longest item times items; 0 for no limit. An item
                that alone is above it is a batch of its own.
            max_waiting: items that may wait.
        """
        self._score = score
        self._max_batches = max_batches
        self._max_items = max_items
        self._max_cost = max_cost
        self._max_waiting = max_waiting
        self._waiting: list[_Waiting] = []
        self._running: set[asyncio.Task[None]] = set()
        self._dispatch_is_due = False

    @property
    def num_waiting(self) -> int:
        """Items that no batch has taken yet."""
        return len(self._waiting)

    async def submit(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Score the jobs of one call; outcomes in order. Cancelling withdraws what has not begun.

        Raises:
            UnavailableError: too many items wait already.
        """
        if len(self._waiting) + len(jobs) > self._max_waiting:
            raise UnavailableError(
                f"{len(self._waiting)} samples wait to be scored already", reason="QUEUE_FULL"
            )
        loop = asyncio.get_running_loop()
        entries = [_Waiting(job, loop.create_future()) for job in jobs]
        self._waiting.extend(entries)
        self._dispatch_soon()
        try:
            return list(await asyncio.gather(*(entry.outcome for entry in entries)))
        except asyncio.CancelledError:
            self._waiting = [entry for entry in self._waiting if not entry.outcome.cancelled()]
            raise

    async def drain(self) -> None:
        """Wait until nothing waits and nothing runs."""
        while self._running or self._waiting:
            if self._running:
                await asyncio.wait(self._running)
            await asyncio.sleep(0)

    def _dispatch_soon(self) -> None:
        """Dispatch after this turn of the loop, so calls that arrive together share a batch."""
        if not self._dispatch_is_due:
            self._dispatch_is_due = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._dispatch_is_due = False
        while self._waiting and len(self._running) < self._max_batches:
            task = asyncio.get_running_loop().create_task(self._run(self._take()))
            self._running.add(task)
            task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._dispatch()

    def _take(self) -> list[_Waiting]:
        """Cut the next batch from the queue: the oldest item and its nearest in length."""
        if self._max_items == 1:
            return [self._waiting.pop(0)]
        oldest = self._waiting[0]
        by_nearness = sorted(self._waiting[:_WINDOW], key=lambda entry: _distance(entry, oldest))
        batch, longest = [oldest], oldest.job.cost
        for entry in by_nearness[1:]:
            longest = max(longest, entry.job.cost)
            padded_cost = longest * (len(batch) + 1)
            if len(batch) == self._max_items or 0 < self._max_cost < padded_cost:
                break
            batch.append(entry)
        taken = set(batch)
        self._waiting = [entry for entry in self._waiting if entry not in taken]
        return batch

    async def _run(self, batch: Sequence[_Waiting]) -> None:
        outcomes = await self._outcomes([entry.job for entry in batch])
        for entry, outcome in zip(batch, outcomes, strict=True):
            if not entry.outcome.done():
                entry.outcome.set_result(outcome)

    async def _outcomes(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Score a batch; whatever is raised becomes failures."""
        try:
            outcomes = await self._score(jobs)
            if len(outcomes) != len(jobs):
                raise RuntimeError(f"{len(outcomes)} outcomes for {len(jobs)} items")
            return outcomes
        except DataError as error:
            if len(jobs) > 1:
                return [(await self._outcomes([job]))[0] for job in jobs]
            return [_failure(error)]
        except QuartetError as error:
            return [_failure(error) for _ in jobs]
        except Exception as error:
            logger.exception("the scorer failed on %s", [job.item.sample_id for job in jobs])
            message = f"the scorer failed: {type(error).__name__}: {error}"
            failure = Failure(error_class="INFRA", reason="SCORER_FAILED", message=message)
            return [failure for _ in jobs]


def _distance(entry: _Waiting, oldest: _Waiting) -> tuple[bool, int]:
    """Sort key: the oldest first, then by difference in length (the sort keeps arrival order)."""
    return entry is not oldest, abs(entry.job.cost - oldest.job.cost)


def _failure(error: QuartetError) -> Failure:
    return Failure(
        error_class=error.error_class,
        reason=error.info.reason,
        message=error.message,
    )

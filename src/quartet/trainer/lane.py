"""Batching without a timer: what gathers while a call is under way goes into the next one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Lane(Generic[Item, Result]):
    """Turns many small requests into few calls.

    An idle service gets an item at once, alone. A busy one gets everything that came in the
    meantime, up to a weight, as its next call. So latency is low when there is little to do and
    calls are large when there is much, without a waiting time to choose.

    Use it as an async context manager: leaving it gives up what is under way.
    """

    def __init__(
        self,
        call: Callable[[list[Item]], Awaitable[Sequence[Result]]],
        *,
        width: int = 1,
        weight: Callable[[Item], int] = lambda _: 1,
        max_weight: int = 1 << 30,
    ) -> None:
        """Make a lane.

        Args:
            call: Answers a list of items with a result for each, in order.
            width: Calls that may be under way at once.
            weight: What an item adds to a call, for example its tokens.
            max_weight: Most weight of a call; a heavier item goes alone.
        """
        self._call = call
        self._width = width
        self._weight = weight
        self._max_weight = max_weight
        self._waiting: deque[tuple[Item, asyncio.Future[Result]]] = deque()
        self._workers: set[asyncio.Task[None]] = set()
        self._busy = 0

    async def __aenter__(self) -> Lane[Item, Result]:
        """Open the lane."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give up what is under way."""
        workers = list(self._workers)
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)

    @property
    def queued(self) -> int:
        """Items that wait for a call."""
        return len(self._waiting)

    async def submit(self, item: Item) -> Result:
        """Have one item answered.

        Raises:
            Exception: whatever the call that carried the item raised.
        """
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._busy < self._width:
            self._busy += 1
            worker = asyncio.create_task(self._work())
            self._workers.add(worker)
            worker.add_done_callback(self._workers.discard)
        return await future

    async def _work(self) -> None:
        """Make calls until nothing waits."""
        try:
            await self._call_all()
        finally:
            # In the same turn of the loop in which nothing waited: a task counts as done only a
            # turn later, and an item submitted in between would find everybody busy for ever.
            self._busy -= 1

    async def _call_all(self) -> None:
        while self._waiting:
            load = self._take()
            futures = [future for _, future in load]
            try:
                results = await self._call([item for item, _ in load])
            except asyncio.CancelledError:
                for future in futures:
                    future.cancel()
                raise
            except Exception as error:
                for future in futures:
                    if not future.done():
                        future.set_exception(error)
                continue
            for future, result in zip(futures, results, strict=True):
                if not future.done():
                    future.set_result(result)

    def _take(self) -> list[tuple[Item, asyncio.Future[Result]]]:
        """The oldest items that fit into one call, at least one."""
        load = [self._waiting.popleft()]
        total = self._weight(load[0][0])
        while self._waiting:
            total += self._weight(self._waiting[0][0])
            if total > self._max_weight:
                break
            load.append(self._waiting.popleft())
        return load

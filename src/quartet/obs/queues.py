"""The queue in front of a thread, as a metric."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TypeVar

from quartet.obs import metrics

Result = TypeVar("Result")


async def submit(executor: Executor, work: Callable[[], Result], *, queue: str) -> Result:
    """Run `work` on an executor; until it begins, it counts in quartet_queue_depth.

    Args:
        executor: where to run it.
        work: what to run.
        queue: name of the queue, the metric's label.
    """
    depth = metrics.QUEUE_DEPTH.labels(queue)

    def begin() -> Result:
        depth.dec()
        return work()

    def forget(future: Future[Result]) -> None:
        # Cancelled before it began: `begin` will never run.
        if future.cancelled():
            depth.dec()

    depth.inc()
    try:
        future = executor.submit(begin)
    except RuntimeError:
        depth.dec()
        raise
    future.add_done_callback(forget)
    return await asyncio.wrap_future(future)

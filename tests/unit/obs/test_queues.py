"""The queue in front of a thread, as a metric."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from quartet.obs import metrics, queues

NAME = "test"


def depth() -> float | None:
    return metrics.REGISTRY.get_sample_value("quartet_queue_depth", {"queue": NAME})


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as made:
        yield made


async def test_what_waits_is_counted_and_what_runs_is_not(executor: ThreadPoolExecutor) -> None:
    running, go_on = threading.Event(), threading.Event()

    def first() -> int:
        running.set()
        go_on.wait(10)
        return 1

    works = [queues.submit(executor, work, queue=NAME) for work in (first, lambda: 2, lambda: 3)]
    tasks = [asyncio.create_task(work) for work in works]
    await asyncio.to_thread(running.wait, 10)
    assert depth() == 2
    tasks[2].cancel()
    await asyncio.wait(tasks[2:])
    assert depth() == 1
    go_on.set()
    assert await asyncio.gather(*tasks[:2]) == [1, 2]
    assert depth() == 0


async def test_failed_and_refused_work_waits_no_more(executor: ThreadPoolExecutor) -> None:
    with pytest.raises(ZeroDivisionError):
        await queues.submit(executor, lambda: 1 / 0, queue=NAME)
    executor.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        await queues.submit(executor, lambda: 1, queue=NAME)
    assert depth() == 0

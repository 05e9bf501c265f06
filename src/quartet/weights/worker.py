"""A thread for work that may never return.

gloo cannot be interrupted: a broadcast whose peer died holds its thread until the group's timeout,
whatever `abort()` says. So such work runs on a thread that can be left behind, and nobody else
ever waits for it without a deadline. The thread is a daemon: it does not hold up the end of the
process either.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

END_SECONDS = 10.0
"""Longest time that the end of the process waits for threads that are still inside gloo."""

_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


class Worker:
    """One daemon thread that runs what is submitted, in order.

    Not a ThreadPoolExecutor: the interpreter joins the threads of those at exit, stuck or not.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        _workers.add(self)

    def submit(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue `work`; the future has its result or its exception."""
        future: Future[T] = Future()

        def job() -> None:
            _complete(future, work, *args, **kwargs)

        self._jobs.put(job)
        return future

    def close(self) -> None:
        """End the thread after what is queued. Returns at once."""
        self._jobs.put(None)

    def join(self, timeout: float) -> None:
        """Wait until the thread has ended, at most `timeout` seconds."""
        self._thread.join(timeout)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # the job holds buffers and groups that must not outlive it


@atexit.register
def _let_threads_end() -> None:
    """Give threads inside torch a moment: one that comes back to a dead interpreter aborts it."""
    deadline = time.monotonic() + END_SECONDS
    running = list(_workers)  # a thread that runs keeps its worker alive
    for worker in running:
        worker.close()
    for worker in running:
        worker.join(max(0.0, deadline - time.monotonic()))


def _complete(future: Future[Any], work: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work(*args, **kwargs)
    except BaseException as error:  # the future carries it to whoever asked
        future.set_exception(error)
    else:
        future.set_result(result)

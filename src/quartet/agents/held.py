"""Who holds a worker's event loop: a few bytes that worker and trainer both see.

Many episodes share a worker. When one of them blocks it, perhaps inside C code that lets nothing
else run, the worker can answer no question; the trainer reads here which episode has to go.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

from quartet.workers.child import end_if_forked

Result = TypeVar("Result")

NOBODY = 0
"""Number of no episode."""

_NUMBER = struct.Struct("<Q")


class Page:
    """The number of the episode whose code runs at this moment."""

    def __init__(self, descriptor: int) -> None:
        """See the page that `new_page` made."""
        self._memory = mmap.mmap(descriptor, mmap.PAGESIZE)

    @property
    def holder(self) -> int:
        """The episode's number, or NOBODY."""
        return _NUMBER.unpack_from(self._memory)[0]

    @holder.setter
    def holder(self, number: int) -> None:
        _NUMBER.pack_into(self._memory, 0, number)

    def close(self) -> None:
        """Look no more."""
        self._memory.close()


def new_page() -> int:
    """Descriptor of a fresh page; it lives as long as somebody sees it."""
    with tempfile.TemporaryFile() as file:
        file.truncate(mmap.PAGESIZE)
        return os.dup(file.fileno())


@types.coroutine
def held(
    page: Page, number: int, coroutine: Coroutine[Any, Any, Result]
) -> Generator[Any, Any, Result]:
    """Await `coroutine`, and show on `page` whenever its code runs rather than waits.

    A child that it forks ends here instead of going on as a second worker.
    """
    pid = os.getpid()
    go: Callable[[Any], Any] = coroutine.send
    sent: Any = None
    while True:
        page.holder = number
        try:
            wanted = go(sent)
        except StopIteration as stop:
            end_if_forked(pid)
            return stop.value
        except BaseException as error:
            end_if_forked(pid, error)
            raise
        finally:
            page.holder = NOBODY
        end_if_forked(pid)
        try:
            go, sent = coroutine.send, (yield wanted)
        except BaseException as error:  # a cancellation, or what a future failed with
            go, sent = coroutine.throw, error

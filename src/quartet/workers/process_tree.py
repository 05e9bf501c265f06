"""Ends a process with everything it started."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """Children, grandchildren and so on, as /proc knows them at this moment (empty off Linux)."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # "pid (name) state ppid ...", where the name may hold blanks and parentheses
            fields = entry.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found, todo = [], [pid]
    while todo:
        born = children.get(todo.pop(), [])
        found += born
        todo += born
    return found


def kill_tree(pid: int) -> None:
    """SIGKILL the group that `pid` leads or led, and descendants that left the group.

    The group is stopped first, so that nobody starts another process in between.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGSTOP)
    strays = descendants(pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    for stray in strays:
        with contextlib.suppress(ProcessLookupError):
            os.kill(stray, signal.SIGKILL)

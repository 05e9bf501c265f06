"""What processes cost, by /proc (Linux)."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
"""Resolution of the numbers here: 100 on Linux, so 10 ms."""


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process, in user and kernel mode, since it began."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    utime, stime = int(fields[11]), int(fields[12])
    return (utime + stime) / TICKS_PER_SECOND


def process_tree(pid: int) -> list[int]:
    """A process and everything that it started, and they in turn."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        # Threads come and go; one that has gone has left its children to another.
        with suppress(FileNotFoundError, ProcessLookupError):
            for child in (task / "children").read_text().split():
                found += process_tree(int(child))
    return found


def name_of(pid: int) -> str:
    """The role of a process that a trainer started, by its settings file; else "trainer"."""
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    if "serve" in words and "--config" in words:
        return Path(words[words.index("--config") + 1]).stem
    return "trainer"


def cpu_by_name(pid: int) -> dict[str, float]:
    """CPU time of each process of a tree by name; those with the same name are added up."""
    seconds: dict[str, float] = {}
    for member in process_tree(pid):
        name = name_of(member)
        seconds[name] = seconds.get(name, 0.0) + cpu_seconds(member)
    return seconds

"""What a piece of work costs this process: time, CPU time, memory (Linux)."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType


class Meter:
    """Measures what happens between `start` and `stop`, or inside a `with`.

    Attributes:
        seconds: on the clock.
        cpu_seconds: of all threads.
        before_mib: memory of the process when it began.
        peak_mib: the most memory while it lasted.
    """

    def __init__(self) -> None:
        """Measure nothing yet."""
        self.seconds = self.cpu_seconds = self.before_mib = self.peak_mib = 0.0
        self._began = (0.0, 0.0)

    def start(self) -> None:
        """Begin; the peak of memory is counted from here."""
        Path("/proc/self/clear_refs").write_text("5")
        self.before_mib = _status("VmRSS")
        self._began = (time.monotonic(), time.process_time())

    def stop(self) -> None:
        """End."""
        self.seconds = time.monotonic() - self._began[0]
        self.cpu_seconds = time.process_time() - self._began[1]
        self.peak_mib = _status("VmHWM")

    def __enter__(self) -> Meter:
        """Start."""
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop."""
        self.stop()


def _status(name: str) -> float:
    """A size in /proc/self/status, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise OSError(f"/proc/self/status has no {name}")

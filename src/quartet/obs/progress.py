"""What a run is doing, said to a person: one line a phase, with rates and what is waited for.

On a terminal the open phases are bars that move; elsewhere each phase is one plain line at its end,
and a phase that takes long says every few seconds how far it is and what it waits for.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

HEARTBEAT_SECONDS = 10.0
"""How often a phase that takes long says so when the output is no terminal."""


RATED = frozenset({"samples", "tokens", "pairs", "steps"})
"""Units whose rate means something; services start at none."""


class Phase:
    """A piece of work under way. Made by `Progress.phase`."""

    def __init__(
        self,
        name: str,
        total: float | None,
        unit: str,
        clock: Callable[[], float],
        on_end: Callable[[Phase], None],
    ) -> None:
        """Name it; `total` is in `unit`, None when unknown."""
        self.name = name
        self.total = total
        self.unit = unit
        self._clock = clock
        self._on_end = on_end
        self.began = clock()
        self.done = 0.0
        self.ended = False
        self.seconds = 0.0
        """How long it took; set when all is done, at the latest when the phase ends."""
        self.waiting_for = ""
        """Who or what is waited for, as text."""
        self.note = ""
        """What to add to the closing line."""

    def advance(self, amount: float = 1) -> None:
        """Count work done."""
        self.done += amount
        self._note_end()

    def skip(self, amount: float) -> None:
        """Take back work that turned out not to be there."""
        if self.total is not None:
            self.total -= amount
            self._note_end()

    def end(self) -> None:
        """Stop the clock and say so, if that was not done when the last work was."""
        if not self.ended:
            self.ended = True
            self.seconds = self._clock() - self.began
            self._on_end(self)

    def _note_end(self) -> None:
        # Phases of a pipeline overlap and are closed together, but each has its own end.
        if self.total is not None and self.done >= self.total:
            self.end()

    def state(self) -> str:
        """How far it is, as one line."""
        seconds = self._clock() - self.began
        of = f"/{self.total:g}" if self.total is not None else ""
        counted = f" {self.done:g}{of} {self.unit}," if self.total is not None or self.done else ""
        waiting = f", waiting for {self.waiting_for}" if self.waiting_for else ""
        return f"{self.name}:{counted} {seconds:.0f} s{waiting}"

    def summary(self) -> str:
        """What it did, as one line."""
        rate = self.done / self.seconds if self.seconds > 0 else 0.0
        counted = f" {self.done:g} {self.unit}" if self.done else ""
        speed = f" ({rate:.1f} {self.unit}/s)" if self.done and self.unit in RATED else ""
        note = f", {self.note}" if self.note else ""
        return f"{self.name}:{counted} in {self.seconds:.1f} s{speed}{note}"


class Progress:
    """Shows phases on a terminal or as plain lines. Use one for a run, and `close` it."""

    def __init__(
        self,
        *,
        stream: TextIO | None = None,
        interval: float = HEARTBEAT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Write to `stream` (default: standard output)."""
        self._stream = stream or sys.stdout
        self._clock = clock
        self._interval = interval
        self._open: list[Phase] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._bars = _bars(self._stream) if self._stream.isatty() else None
        if self._bars is not None:
            self._bars.start()
        # A thread, so that a phase that blocks the event loop is seen to block it.
        self._beat = threading.Thread(target=self._heartbeat, name="progress", daemon=True)
        self._beat.start()

    @contextmanager
    def phase(self, name: str, *, total: float | None = None, unit: str = "") -> Iterator[Phase]:
        """Show a phase while the body runs, and its one line afterwards.

        A phase that ends by an exception leaves no closing line: the error speaks for it.
        """
        phase = Phase(name, total, unit, self._clock, lambda p: self.say(p.summary()))
        with self._lock:
            self._open.append(phase)
        task = None if self._bars is None else self._bars.add_task(name, total=total)
        try:
            yield phase
            phase.end()
        finally:
            with self._lock:
                self._open.remove(phase)
            if self._bars is not None and task is not None:
                self._bars.remove_task(task)

    def say(self, line: str) -> None:
        """Write one line, above the bars if there are any."""
        if self._bars is not None:
            self._bars.console.print(line, markup=False, highlight=False)
            return
        self._stream.write(line + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Take the bars away. May be called twice."""
        if not self._closed.is_set():
            self._closed.set()
            self._beat.join()
            if self._bars is not None:
                self._bars.stop()

    def _heartbeat(self) -> None:
        """Every interval, say how far the open phases are; move the bars more often."""
        pause = 0.2 if self._bars is not None else self._interval
        while not self._closed.wait(pause):
            with self._lock:
                phases = list(self._open)
            if self._bars is not None:
                for task, phase in zip(list(self._bars.tasks), phases, strict=False):
                    self._bars.update(task.id, completed=phase.done, description=phase.state())
                continue
            for phase in phases:
                if not phase.ended and self._clock() - phase.began >= self._interval:
                    self.say(phase.state())


def _bars(stream: TextIO) -> RichProgress:
    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(file=stream),
        transient=True,
    )

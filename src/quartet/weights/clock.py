"""Where the time of a push goes, on the sender's side."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Literal, TypeAlias

Phase: TypeAlias = Literal["gather", "pack", "digest", "broadcast"]


class PushClock:
    """Seconds that each phase of one push took, added up over its buckets.

    Phases run beside one another, so the sum may be longer than the push. Each phase belongs to one
    thread.
    """

    def __init__(self) -> None:
        self._seconds: defaultdict[Phase, float] = defaultdict(float)

    @contextlib.contextmanager
    def measure(self, phase: Phase) -> Iterator[None]:
        """Add the time inside to a phase, also when it fails."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self._seconds[phase] += time.monotonic() - begun

    def seconds(self, phase: Phase) -> float:
        """So far; 0 for a phase that has not been entered."""
        return self._seconds.get(phase, 0.0)

"""Samples that cannot be trained: each is counted by its reason, and too many end the run."""

from __future__ import annotations

from collections import Counter

from quartet.errors import FatalError
from quartet.types import Failure


def reason_of(where: str, failure: Failure) -> str:
    """Name for `dropped/<reason>`: which service, and what it called the failure."""
    return f"{where}_{failure.reason.lower()}" if failure.reason else f"{where}_failed"


class Drops:
    """Counts drops, and raises when nothing else happens any more."""

    def __init__(self, *, limit: int) -> None:
        """Allow fewer than `limit` samples to be dropped in a row."""
        self._limit = limit
        self._totals: Counter[str] = Counter()
        self._in_a_row = 0

    def drop(self, reason: str, message: str) -> None:
        """Count one dropped sample.

        Raises:
            FatalError: no sample has been kept for too long.
        """
        self._totals[reason] += 1
        self._in_a_row += 1
        if self._in_a_row >= self._limit:
            often, count = self._totals.most_common(1)[0]
            raise FatalError(
                f"{self._in_a_row} samples in a row were dropped; most often in this run for "
                f"{often} ({count} times); the last: {message}",
                reason="TOO_MANY_DROPS",
            )

    def set_aside(self, reason: str, count: int) -> None:
        """Count samples that are whole and still not trained on: no failure, so no alarm."""
        if count:
            self._totals[reason] += count
            self._in_a_row = 0

    def keep(self, count: int) -> None:
        """Note that samples went through."""
        if count:
            self._in_a_row = 0

    def totals(self) -> dict[str, int]:
        """Drops of the whole run by reason."""
        return dict(sorted(self._totals.items()))

"""What became of the rows of a data set: nothing leaves in silence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from quartet.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Dropped:
    """Why a row gives no sample."""

    reason: str
    """snake_case name, stable, for counting."""
    detail: str = ""
    """What exactly, for the first example."""


@dataclass(kw_only=True, slots=True)
class Report:
    """Counts by reason of what was dropped or changed, each with its first example."""

    source: str
    """The data set, as the user named it."""
    rows: int = 0
    """Rows read."""
    counts: Counter[str] = field(default_factory=Counter)
    """Rows dropped, by reason."""
    truncated: int = 0
    """Samples kept, but cut to the longest length."""
    examples: dict[str, str] = field(default_factory=dict)
    """First row of each reason."""

    def drop(self, row: int, dropped: Dropped) -> None:
        """Count a dropped row."""
        self.counts[dropped.reason] += 1
        detail = f": {dropped.detail}" if dropped.detail else ""
        self.examples.setdefault(dropped.reason, f"row {row}{detail}")

    def kept(self, made: Iterable[T | Dropped]) -> Iterator[tuple[int, T]]:
        """Row number and result of each row that gives one; the others are counted."""
        for row, result in enumerate(made):
            if isinstance(result, Dropped):
                self.drop(row, result)
            else:
                yield row, result

    @property
    def dropped(self) -> int:
        """Rows dropped for any reason."""
        return self.counts.total()

    def lines(self) -> list[str]:
        """One line for a person for each thing that happened; empty when nothing did."""
        result = [
            f"{self.source}: dropped {count} of {self.rows} rows, {reason} "
            f"(first: {self.examples[reason]})"
            for reason, count in self.counts.most_common()
        ]
        if self.truncated:
            result.append(f"{self.source}: cut {self.truncated} of {self.rows} rows to max_len")
        return result


@dataclass(frozen=True, kw_only=True, slots=True)
class Built(Generic[T]):
    """Samples, and what became of the rows that gave none."""

    samples: list[T]
    report: Report

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.samples)

    def require_some(self, field_name: str) -> Built[T]:
        """Itself, when there is a sample.

        Raises:
            ConfigError: there is none; the message says why the rows went.
        """
        if self.samples:
            return self
        why = "; ".join(self.report.lines()) or "it has no rows"
        raise ConfigError(
            f"the data set {self.report.source!r} gives no usable sample: {why}",
            reason="EMPTY_DATASET",
            field=field_name,
            value=self.report.source,
            remedy="look at the first dropped row, and at the keys and template flags",
        )

"""Which prompt groups are worth training on (dynamic sampling of DAPO, arXiv:2503.14476)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np


class FilterVerdict(StrEnum):
    """Why a group stays or goes."""

    KEEP = "keep"
    TOO_FEW_SCORES = "too_few_scores"
    MEAN_OUT_OF_RANGE = "mean_out_of_range"
    ALL_EQUAL = "all_equal"


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupFilter:
    """Keep a group iff low < mean(score) < high and its scores are not all the same.

    A group of equal scores has advantage 0 everywhere: it costs a training step and teaches
    nothing, also when its mean lies inside the range.
    """

    low: float = 0.0
    high: float = 1.0
    mean_only: bool = False
    """The incumbent's rule: look at the mean alone."""

    def __post_init__(self) -> None:
        """Refuse an empty range."""
        if not self.low < self.high:
            raise ValueError(
                f"the range ({self.low}, {self.high}) is empty; low must be below high"
            )

    def verdict(self, scores: Sequence[float | None]) -> FilterVerdict:
        """Judge one group by the scores of its members; None is a member without a score."""
        known = np.array([s for s in scores if s is not None], dtype=np.float64)
        if known.size < (1 if self.mean_only else 2) or not np.isfinite(known).all():
            return FilterVerdict.TOO_FEW_SCORES
        if not self.low < known.mean() < self.high:
            return FilterVerdict.MEAN_OUT_OF_RANGE
        if not self.mean_only and known.max() == known.min():
            return FilterVerdict.ALL_EQUAL
        return FilterVerdict.KEEP

"""Ragged arrays: B sequences end to end in flat arrays of N elements.

The recursions of reinforcement learning run backwards in time. Here they run over a dense matrix of
action tokens, one row a sequence, so that Python loops over time only and numpy over sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]
Int = NDArray[np.int64]
Bool = NDArray[np.bool_]


def row_of_token(lengths: NDArray[np.integer]) -> Int:
    """[N] index of the sequence that each token belongs to."""
    return np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)


def row_sums(flat: NDArray[np.floating] | Bool, lengths: NDArray[np.integer]) -> Float:
    """[B] sum of each sequence of a flat [N] array, in float64."""
    return sums_by(row_of_token(lengths), flat, len(lengths))


def sums_by(index: Int, values: NDArray[np.floating] | Bool, size: int) -> Float:
    """[size] sum in float64 of the values that share an index."""
    weights = np.asarray(values, dtype=np.float64)
    return np.asarray(np.bincount(index, weights=weights, minlength=size), dtype=np.float64)


def row_means(flat: NDArray[np.floating], mask: Bool, lengths: NDArray[np.integer]) -> Float:
    """[B] mean over the tokens under `mask`; 0 for a sequence that has none."""
    sums = row_sums(np.where(mask, flat, 0.0), lengths)
    return sums / np.maximum(row_sums(mask, lengths), 1.0)


def last_action(mask: Bool, lengths: NDArray[np.integer]) -> Int:
    """[B] flat index of the last action token of each sequence; -1 where there is none."""
    last = np.full(len(lengths), -1, dtype=np.int64)
    actions = np.flatnonzero(mask)
    # Later indices of a row overwrite earlier ones.
    last[row_of_token(lengths)[actions]] = actions
    return last


@dataclass(frozen=True, slots=True)
class Grid:
    """Where each of some tokens stands in a dense [B, T] matrix, rows filled from the left."""

    rows: Int
    columns: Int
    indices: Int
    """Position of each such token in the flat array."""
    shape: tuple[int, int]

    @classmethod
    def of(cls, selected: Bool, lengths: NDArray[np.integer]) -> Grid:
        """Lay out the tokens under `selected` without holes, T being the most a row has."""
        indices = np.flatnonzero(selected)
        rows = row_of_token(lengths)[indices]
        counts = np.bincount(rows, minlength=len(lengths))
        starts = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)
        columns = np.arange(len(indices), dtype=np.int64) - starts[rows]
        return cls(rows, columns, indices, (len(lengths), int(counts.max(initial=0))))

    def dense(self, flat: NDArray[np.floating]) -> Float:
        """[B, T] of a flat array, zeros where a row has ended."""
        matrix = np.zeros(self.shape)
        matrix[self.rows, self.columns] = flat[self.indices]
        return matrix

    def flat(self, matrix: Float, size: int) -> Float:
        """The flat [size] array of a dense one, zeros where no token was selected."""
        result = np.zeros(size)
        result[self.indices] = matrix[self.rows, self.columns]
        return result

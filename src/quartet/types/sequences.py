"""Ragged token sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SequenceBatch:
    """B token sequences, end to end.

    Example:
        >>> SequenceBatch.of([[5, 6, 7], [8, 9]]).lengths.tolist()
        [3, 2]
    """

    token_ids: NDArray[np.int32]  # [N]
    """All tokens, one sequence after the other."""
    lengths: NDArray[np.int32]  # [B]
    """Tokens of each sequence, each at least 1."""
    sample_ids: tuple[str, ...] = ()
    """One name a sequence, or none."""

    @classmethod
    def of(
        cls, sequences: Sequence[Sequence[int]], sample_ids: Sequence[str] = ()
    ) -> SequenceBatch:
        """Build a batch from lists of token ids."""
        flat = [np.asarray(s, dtype=np.int32) for s in sequences]
        tokens = np.concatenate(flat) if flat else np.zeros(0, np.int32)
        lengths = np.array([len(s) for s in flat], dtype=np.int32)
        return cls(token_ids=tokens, lengths=lengths, sample_ids=tuple(sample_ids))

    def __len__(self) -> int:
        """Number of sequences, B."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Number of tokens, N."""
        return len(self.token_ids)

    @property
    def offsets(self) -> NDArray[np.int64]:
        """[B + 1] start of each sequence in the flat arrays, and N."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    def rows(self, flat: NDArray[np.generic] | None = None) -> list[NDArray[np.generic]]:
        """Cut a flat [N] array (default: the tokens) into one view a sequence."""
        values = self.token_ids if flat is None else flat
        return np.split(values, self.offsets[1:-1]) if len(self) else []

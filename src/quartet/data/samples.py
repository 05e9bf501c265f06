"""What data sets become: frozen samples of token ids, and batches for the learner."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quartet.types import SequenceBatch, TrainSamples


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One row of a prompt data set."""

    prompt_id: str
    """Unique in the data set; the same for the same text in every run and every order of rows."""
    text: str
    """As rendered, chat template included."""
    token_ids: tuple[int, ...]
    label: Any = ""
    """What reward functions get as label: any JSON value."""
    datasource: str = "default"
    """Which data set it came from; evaluation reports one by one."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenSample:
    """A text to learn, T tokens."""

    sample_id: str
    token_ids: NDArray[np.int32]  # [T]
    loss_mask: NDArray[np.bool_]  # [T]
    """True on tokens that are to be learnt; never on the first, which nothing predicts."""

    def __len__(self) -> int:
        """Number of tokens, T."""
        return len(self.token_ids)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PreferencePair:
    """Two answers to one prompt, the better one first. Both sequences begin with the prompt."""

    pair_id: str
    chosen: TokenSample
    rejected: TokenSample
    margin: float = 0.0
    """By how much the chosen one should win; 0 when the data set does not say."""


def content_id(*content: Any) -> str:
    """16 hex digits that name some JSON content."""
    text = json.dumps(content, ensure_ascii=True, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]


def token_batch(samples: Sequence[TokenSample]) -> TrainSamples:
    """Samples end to end, their loss masks as action masks."""
    return TrainSamples(
        sequences=SequenceBatch(
            token_ids=_join([s.token_ids for s in samples], np.dtype(np.int32)),
            lengths=np.array([len(s) for s in samples], dtype=np.int32),
            sample_ids=_distinct([s.sample_id for s in samples]),
        ),
        action_mask=_join([s.loss_mask for s in samples], np.dtype(np.bool_)),
    )


def pair_batch(pairs: Sequence[PreferencePair]) -> TrainSamples:
    """Pairs as the pairwise losses want them: chosen, rejected, chosen, rejected, ..."""
    batch = token_batch([side for pair in pairs for side in (pair.chosen, pair.rejected)])
    return TrainSamples(
        sequences=batch.sequences,
        action_mask=batch.action_mask,
        margins=np.array([pair.margin for pair in pairs], dtype=np.float32),
    )


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Names with the second of a kind marked "#2": the same text may stand twice in a batch.

    Data sets repeat rows, and preference data sets one good answer beside several bad ones.
    """
    seen: Counter[str] = Counter()
    result = []
    for name in names:
        seen[name] += 1
        result.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return tuple(result)


def _join(arrays: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)


def epoch_order(size: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """[size] order of an epoch's samples: a function of its arguments and of nothing else."""
    return np.random.default_rng([seed, epoch]).permutation(size)

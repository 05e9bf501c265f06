"""Samples of a step: joined, checked, and cut into micro-batches. numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quartet.types import SequenceBatch, TrainSamples

PER_TOKEN = (
    "action_mask",
    "advantages",
    "old_logprobs",
    "ref_logprobs",
    "rollout_logprobs",
    "returns",
    "old_values",
)
"""Fields of TrainSamples that are [N]."""


def join(parts: Sequence[TrainSamples]) -> TrainSamples:
    """Put chunks end to end. An array must be in all of them or in none (see checks)."""
    if len(parts) == 1:
        return parts[0]
    names = [name for part in parts for name in part.sequences.sample_ids]
    joined: dict[str, Any] = {
        name: _joined([getattr(part, name) for part in parts]) for name in (*PER_TOKEN, "margins")
    }
    return TrainSamples(
        sequences=SequenceBatch(
            token_ids=np.concatenate([part.sequences.token_ids for part in parts]),
            lengths=np.concatenate([part.sequences.lengths for part in parts]),
            sample_ids=tuple(names),
        ),
        rollout_logprob_spec=parts[0].rollout_logprob_spec,
        **joined,
    )


def take(samples: TrainSamples, rows: Sequence[int]) -> TrainSamples:
    """The sequences `rows`, in that order, with all that belongs to them.

    Margins belong to pairs and go with the chosen sequence, which has an even number.
    """
    places = token_places(samples.sequences, rows)
    names = samples.sequences.sample_ids
    picked: dict[str, Any] = {
        name: None if getattr(samples, name) is None else getattr(samples, name)[places]
        for name in PER_TOKEN
    }
    if samples.margins is not None:
        picked["margins"] = samples.margins[[row // 2 for row in rows[::2]]]
    sequences = SequenceBatch(
        token_ids=samples.sequences.token_ids[places],
        lengths=samples.sequences.lengths[list(rows)],
        sample_ids=tuple(names[row] for row in rows) if names else (),
    )
    return replace(samples, sequences=sequences, **picked)


def nothing_like(samples: TrainSamples) -> TrainSamples:
    """One token of the first sequence, of which nothing is trained.

    A forward and backward pass over it takes part in all collectives and adds exactly zero.
    """
    one = take(samples, [0])
    cut: dict[str, Any] = {
        name: None if getattr(one, name) is None else getattr(one, name)[:1] for name in PER_TOKEN
    }
    cut["action_mask"] = np.zeros(1, dtype=bool)
    sequences = SequenceBatch(token_ids=one.sequences.token_ids[:1], lengths=np.ones(1, np.int32))
    margins = None if samples.margins is None else np.zeros(0, np.float32)
    return replace(one, sequences=sequences, margins=margins, **cut)


def token_places(sequences: SequenceBatch, rows: Sequence[int]) -> NDArray[np.int64]:
    """[n] int64 places in the flat arrays of all tokens of the sequences `rows`, in that order."""
    offsets = sequences.offsets
    return np.concatenate([np.arange(offsets[row], offsets[row + 1]) for row in rows])


def names_of(sequences: SequenceBatch) -> Sequence[str]:
    """One name a sequence: its sample id, or its number."""
    return sequences.sample_ids or [f"#{number}" for number in range(len(sequences))]


def present(samples: TrainSamples) -> frozenset[str]:
    """Names of the arrays that are there."""
    return frozenset(
        field.name for field in fields(samples) if getattr(samples, field.name) is not None
    )


def _joined(values: Sequence[NDArray[np.generic] | None]) -> NDArray[np.generic] | None:
    there = [value for value in values if value is not None]
    return np.concatenate(there) if there else None

"""Ragged batches as messages of about policy.CHUNK_BYTES: large ones cut, small ones together.

A message of a stream costs 0.5 ms of CPU whatever it holds, so many small ones are dear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
from numpy.typing import NDArray

from quartet.rpc import policy
from quartet.types import SequenceBatch, TrainSamples

_NOT_PER_TOKEN = ("sequences", "margins", "rollout_logprob_spec")


def plan_chunks(
    lengths: NDArray[np.int32],
    bytes_per_token: int,
    *,
    unit: int = 1,
    max_bytes: int = policy.CHUNK_BYTES,
) -> list[tuple[int, int]]:
    """Row ranges (start, end) of consecutive sequences, each of at most `max_bytes`.

    Args:
        lengths: [B] tokens of each sequence.
        bytes_per_token: what one token takes on the wire.
        unit: sequences that stay together: 2 for pairs.
        max_bytes: aim; a unit larger than this is a chunk of its own.
    """
    if 0 < int(lengths.sum()) * bytes_per_token <= max_bytes:
        return [(0, len(lengths))]
    ranges: list[tuple[int, int]] = []
    start, size = 0, 0
    for row in range(0, len(lengths), unit):
        bytes_of_unit = int(lengths[row : row + unit].sum()) * bytes_per_token
        if row > start and size + bytes_of_unit > max_bytes:
            ranges.append((start, row))
            start, size = row, 0
        size += bytes_of_unit
    if start < len(lengths):
        ranges.append((start, len(lengths)))
    return ranges


def slice_batch(batch: SequenceBatch, start: int, end: int) -> SequenceBatch:
    """Sequences start to end (exclusive), as views."""
    first, last = batch.offsets[[start, end]]
    return SequenceBatch(
        token_ids=batch.token_ids[first:last],
        lengths=batch.lengths[start:end],
        sample_ids=batch.sample_ids[start:end],
    )


def split_batch(batch: SequenceBatch, *, bytes_per_token: int = 4) -> list[SequenceBatch]:
    """A batch as chunks."""
    ranges = plan_chunks(batch.lengths, bytes_per_token)
    return [slice_batch(batch, start, end) for start, end in ranges]


def join_batches(batches: Sequence[SequenceBatch]) -> SequenceBatch:
    """All sequences of some batches as one batch, in order. One without a name has an empty one."""
    named = any(batch.sample_ids for batch in batches)
    return SequenceBatch(
        token_ids=np.concatenate([batch.token_ids for batch in batches]),
        lengths=np.concatenate([batch.lengths for batch in batches]),
        sample_ids=tuple(
            name for batch in batches for name in batch.sample_ids or ("",) * len(batch) if named
        ),
    )


def cut(flat: NDArray[np.float32], sizes: Sequence[int]) -> list[NDArray[np.float32]]:
    """A flat array as views of the given sizes, which add up to it."""
    return np.split(flat, np.cumsum(sizes)[:-1])


def split_samples(samples: TrainSamples, *, unit: int = 1) -> list[TrainSamples]:
    """Samples as chunks; `unit` sequences stay together."""
    arrays = {
        field.name: array
        for field in fields(samples)
        if field.name not in _NOT_PER_TOKEN and (array := getattr(samples, field.name)) is not None
    }
    batch = samples.sequences
    bytes_per_token = 4 + sum(array.itemsize for array in arrays.values())
    offsets = batch.offsets
    chunks = []
    for start, end in plan_chunks(batch.lengths, bytes_per_token, unit=unit):
        first, last = offsets[[start, end]]
        cut = {name: array[first:last] for name, array in arrays.items()}
        if samples.margins is not None:
            cut["margins"] = samples.margins[start // 2 : end // 2]
        chunks.append(replace(samples, sequences=slice_batch(batch, start, end), **cut))
    return chunks

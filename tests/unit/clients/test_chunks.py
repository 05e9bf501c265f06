"""Cutting batches into messages."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quartet.clients.chunks import cut, join_batches, plan_chunks, split_batch
from quartet.types import SequenceBatch

lengths = st.lists(st.integers(1, 50), max_size=30)


@given(lengths, st.integers(1, 8), st.sampled_from([1, 2]), st.integers(1, 400))
def test_every_sequence_once_in_order(
    rows: list[int], size: int, unit: int, max_bytes: int
) -> None:
    rows = rows[: len(rows) // unit * unit]
    array = np.array(rows, np.int32)
    ranges = plan_chunks(array, size, unit=unit, max_bytes=max_bytes)
    covered = [row for start, end in ranges for row in range(start, end)]
    assert covered == list(range(len(rows)))
    for start, end in ranges:
        assert start % unit == 0
        assert end % unit == 0
        fits = array[start:end].sum() * size <= max_bytes
        assert fits or end - start == unit


@given(lengths, st.integers(1, 400))
def test_no_chunk_could_take_the_next_sequence(rows: list[int], max_bytes: int) -> None:
    array = np.array(rows, np.int32)
    ranges = plan_chunks(array, 4, max_bytes=max_bytes)
    for (start, end), (_, following) in itertools.pairwise(ranges):
        assert following > end
        assert array[start : end + 1].sum() * 4 > max_bytes


def test_small_batch_is_one_chunk() -> None:
    batch = SequenceBatch.of([[1, 2], [3]], ["a", "b"])
    (only,) = split_batch(batch)
    assert only.token_ids.tolist() == [1, 2, 3]
    assert only.sample_ids == ("a", "b")


def test_empty_batch_is_no_chunk() -> None:
    assert split_batch(SequenceBatch.of([])) == []


@given(st.lists(lengths, min_size=1, max_size=8))
def test_joined_batches_are_cut_apart_again(all_rows: list[list[int]]) -> None:
    batches = [SequenceBatch.of([list(range(n)) for n in rows]) for rows in all_rows]
    joined = join_batches(batches)
    assert joined.lengths.tolist() == [n for rows in all_rows for n in rows]
    flat = np.arange(joined.num_tokens, dtype=np.float32)
    parts = cut(flat, [batch.num_tokens for batch in batches])
    assert [len(part) for part in parts] == [batch.num_tokens for batch in batches]
    assert np.array_equal(np.concatenate(parts), flat)


def test_names_stay_with_their_sequences() -> None:
    named, nameless = SequenceBatch.of([[1], [2]], ["a", "b"]), SequenceBatch.of([[3]])
    assert join_batches([nameless, named]).sample_ids == ("", "a", "b")
    assert join_batches([nameless, nameless]).sample_ids == ()

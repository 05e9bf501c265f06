"""Plans of micro-batches: nothing lost, nothing twice, limits kept, ranks alike."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quartet_learner.batching import Limits, plan_micro_batches, tokens_taken

from quartet.errors import RequestError


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=60),
    max_tokens=st.one_of(st.none(), st.integers(120, 400)),
    max_units=st.one_of(st.none(), st.integers(1, 9)),
    world_size=st.integers(1, 5),
    padded=st.booleans(),
    pairs=st.booleans(),
)
def test_every_plan(lengths, max_tokens, max_units, world_size, padded, pairs):
    per_unit = 2 if pairs else 1
    lengths = lengths[: len(lengths) // per_unit * per_unit] or [3] * per_unit
    limits = Limits(max_tokens=max_tokens, max_units=max_units, padded=padded)
    plan = plan_micro_batches(lengths, limits, world_size=world_size, sequences_per_unit=per_unit)
    batches = [batch for rank in plan.ranks for batch in rank]
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert len({len(rank) for rank in plan.ranks}) == 1
    assert plan.num_micro_batches == sum(1 for batch in batches if batch)
    for batch in batches:
        assert max_tokens is None or tokens_taken(batch, lengths, padded) <= max_tokens
        assert max_units is None or len(batch) <= max_units * per_unit
        if pairs:
            assert all(
                b == a + 1 and a % 2 == 0 for a, b in zip(batch[::2], batch[1::2], strict=True)
            )
    # An empty micro-batch is only there when nothing could be split any more.
    if any(not batch for batch in batches):
        assert all(len(batch) <= per_unit for batch in batches)


def test_order_of_samples_does_not_change_the_cut():
    lengths = [7, 3, 19, 4, 11, 8]
    shuffled = [19, 8, 3, 11, 7, 4]
    limits = Limits(max_tokens=24)

    def cut(values):
        plan = plan_micro_batches(values, limits, world_size=2)
        return sorted(sorted(values[i] for i in batch) for rank in plan.ranks for batch in rank)

    assert cut(lengths) == cut(shuffled)


def test_ranks_get_about_the_same_work():
    lengths = [100, 90, 80, 70, 60, 50, 40, 30] * 4
    plan = plan_micro_batches(lengths, Limits(max_tokens=200, padded=False), world_size=4)
    loads = [sum(lengths[i] for batch in rank for i in batch) for rank in plan.ranks]
    assert max(loads) <= 1.25 * min(loads)


def test_two_ranks_share_one_micro_batch_of_many_sequences():
    plan = plan_micro_batches([5] * 8, Limits(max_units=8), world_size=2)
    assert [[len(batch) for batch in rank] for rank in plan.ranks] == [[4], [4]]


def test_a_sequence_that_fits_nowhere_is_named():
    with pytest.raises(RequestError) as caught:
        plan_micro_batches([3, 50], Limits(max_tokens=40), world_size=1, names=["short", "long"])
    assert caught.value.info.sample_id == "long"
    assert caught.value.info.field == "max_tokens_per_micro_batch"
    assert "50" in str(caught.value)


def test_a_pair_must_fit_as_a_whole():
    with pytest.raises(RequestError, match="pair of 42 tokens"):
        plan_micro_batches([21, 20], Limits(max_tokens=41), world_size=1, sequences_per_unit=2)

"""Group filtering and length balance."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.algorithms import FilterVerdict, GroupFilter, karmarkar_karp


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([1, 0, 0], FilterVerdict.KEEP),
        ([1, 1, 1], FilterVerdict.MEAN_OUT_OF_RANGE),
        ([0, 0, 0], FilterVerdict.MEAN_OUT_OF_RANGE),
        ([0.5, 0.5], FilterVerdict.ALL_EQUAL),
        ([1, None, 0], FilterVerdict.KEEP),
        ([None, None, 0.5], FilterVerdict.TOO_FEW_SCORES),
        ([None], FilterVerdict.TOO_FEW_SCORES),
        ([], FilterVerdict.TOO_FEW_SCORES),
        ([float("nan"), 1.0], FilterVerdict.TOO_FEW_SCORES),
    ],
)
def test_verdicts(scores, expected):
    assert GroupFilter().verdict(scores) is expected


def test_the_incumbents_rule_looks_at_the_mean_alone():
    rule = GroupFilter(mean_only=True)
    assert rule.verdict([0.5, 0.5]) is FilterVerdict.KEEP
    assert rule.verdict([1.0, 1.0]) is FilterVerdict.MEAN_OUT_OF_RANGE


def test_an_empty_range_is_refused():
    with pytest.raises(ValueError, match="low must be below high"):
        GroupFilter(low=1.0, high=0.0)


@pytest.mark.parametrize("case_id", ["k2_eq0", "k3_eq0", "k2_eq1", "k4_eq1"])
def test_partitions_are_the_incumbents(vectors, case_id):
    case = vectors("partitions")[f"openrlhf_partition_{case_id}"]
    lengths, params = case["inputs"]["lengths"], case["params"]
    parts = karmarkar_karp(lengths, params["k"], equal_size=params["equal_size"])
    assert parts == case["expected"]["partitions"]
    assert [sum(lengths[i] for i in part) for part in parts] == case["expected"]["sums"]


@given(st.lists(st.integers(1, 5000), max_size=40), st.integers(1, 8))
def test_every_item_once_and_no_empty_part_without_need(lengths, parts):
    result = karmarkar_karp(lengths, parts)
    assert sorted(itertools.chain(*result)) == list(range(len(lengths)))
    assert sum(bool(part) for part in result) == min(parts, len(lengths))


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=10), st.integers(1, 4))
def test_equal_sizes_and_a_spread_below_the_longest(lengths, parts):
    lengths = lengths * parts
    result = karmarkar_karp(lengths, parts, equal_size=True)
    assert {len(part) for part in result} == {len(lengths) // parts}
    sums = [sum(lengths[i] for i in part) for part in result]
    assert max(sums) - min(sums) <= max(lengths)


def test_impossible_cuts_are_refused():
    with pytest.raises(ValueError, match="at least 1"):
        karmarkar_karp([1, 2], 0)
    with pytest.raises(ValueError, match="equal size"):
        karmarkar_karp([1, 2, 3], 2, equal_size=True)

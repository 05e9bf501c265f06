"""Normalisation over action tokens."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quartet.algorithms import whiten


def test_incumbents_numbers(vectors, padded):
    case = vectors("whitening")["openrlhf"]
    table = padded.of(case["inputs"]["mask"])
    result = whiten(table.flat(case["inputs"]["x"]), table.flat_mask)
    table.assert_close(result, case["expected"]["y"])
    assert not result[~table.flat_mask].any()


def test_subtracting_the_mean_alone(vectors, padded):
    case = vectors("whitening")["openrlhf"]
    table = padded.of(case["inputs"]["mask"])
    values = table.flat(case["inputs"]["x"])
    result = whiten(values, table.flat_mask, scale=False)
    table.assert_close(result, values - case["expected"]["mean"], atol=1e-6)


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.booleans()), min_size=1, max_size=30))
def test_mean_zero_and_at_most_unit_scale(pairs):
    values, mask = np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs], bool)
    result = whiten(np.where(mask, values, np.nan), mask)
    assert np.isfinite(result).all()
    if mask.any():
        assert abs(result[mask].mean()) < 1e-6
        assert result[mask].std() < 1 + 1e-9


def test_tiny_differences_are_not_blown_up():
    result = whiten(np.array([1e-9, -1e-9]), np.ones(2, bool))
    np.testing.assert_allclose(result, [1e-5, -1e-5], rtol=1e-9)


@given(st.floats(-1e9, 1e9), st.integers(1, 50))
def test_equal_values_become_exactly_zero(value, count):
    assert not whiten(np.full(count, value), np.ones(count, bool)).any()


def test_nothing_selected():
    assert whiten(np.array([np.nan, 1.0]), np.zeros(2, bool)).tolist() == [0.0, 0.0]

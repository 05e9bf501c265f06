"""pass@k against the enumeration of all choices."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.algorithms import pass_at_k


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_it_is_the_share_of_choices_that_hold_a_correct_sample(correct, data):
    k = data.draw(st.integers(1, len(correct)))
    choices = list(itertools.combinations(correct, k))
    expected = sum(map(any, choices)) / len(choices)
    assert pass_at_k(len(correct), sum(correct), k) == pytest.approx(expected)


def test_many_samples_neither_overflow_nor_lose_the_small_difference():
    # 1 - prod over the last c factors of (1 - k / i), another way to write the same.
    expected = 1.0
    for i in range(1000 - 1 + 1, 1001):
        expected *= 1 - 5 / i
    assert pass_at_k(1000, 1, 5) == pytest.approx(1 - expected, rel=1e-9)


@pytest.mark.parametrize("numbers", [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_numbers_that_fit_no_samples_are_refused(numbers):
    with pytest.raises(ValueError, match=r"cannot be correct|say nothing"):
        pass_at_k(*numbers)

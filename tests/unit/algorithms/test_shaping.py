"""Penalties and the placement of rewards."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.algorithms import overlong_penalty, stop_properly_penalty, token_rewards


def test_overlong_penalty_is_the_incumbents(vectors):
    case = vectors("reward_shaping")["overlong_openrlhf"]
    result = overlong_penalty(
        np.array(case["inputs"]["rewards"]),
        np.array(case["inputs"]["response_length"]),
        max_new_tokens=case["params"]["max_new_tokens"],
        buffer_length=case["params"]["overlong_buffer_len"],
        factor=case["params"]["factor"],
    )
    np.testing.assert_allclose(result, case["expected"]["rewards"], rtol=2e-6, atol=1e-7)


@given(st.integers(1, 200), st.integers(1, 100), st.floats(0, 5))
def test_overlong_penalty_grows_linearly_to_its_factor(length, buffer, factor):
    result = overlong_penalty(
        np.zeros(1), np.array([length]), max_new_tokens=100, buffer_length=buffer, factor=factor
    )
    expected = -factor * np.interp(length, [100 - buffer, 100], [0, 1])
    np.testing.assert_allclose(result, [expected], atol=1e-12)


@pytest.mark.parametrize("buffer", [0, -1, 101, float("nan")])
def test_overlong_buffer_without_meaning_is_refused(buffer):
    with pytest.raises(ValueError, match="overlong buffer"):
        overlong_penalty(np.zeros(1), np.ones(1, int), max_new_tokens=100, buffer_length=buffer)


def test_negative_overlong_factor_is_refused():
    with pytest.raises(ValueError, match="factor"):
        overlong_penalty(np.zeros(1), np.ones(1, int), max_new_tokens=9, buffer_length=4, factor=-1)


@pytest.mark.parametrize("case_id", ["0.3", "0.0", "-0.5"])
def test_legacy_stop_penalty_is_the_incumbents(vectors, case_id):
    case = vectors("reward_shaping")[f"stop_properly_{case_id}"]
    truncated = np.array(case["inputs"]["truncated"], bool)
    rewards = np.array(case["inputs"]["rewards"])
    coef = case["params"]["coef"]
    result = stop_properly_penalty(rewards, truncated, coef=coef, legacy=True)
    np.testing.assert_allclose(result, case["expected"]["rewards"], rtol=2e-6)


def test_stop_penalty_by_hand():
    rewards, truncated = np.array([1.0, -1.0, 1.0, -1.0]), np.array([0, 0, 1, 1], bool)
    for coef, expected in [
        (0.0, [1, -1, 0, -1]),
        (0.5, [1, -1, 0.5, -1]),
        (-0.5, [1, -1, -0.5, -1]),
    ]:
        result = stop_properly_penalty(rewards, truncated, coef=coef)
        np.testing.assert_array_equal(result, expected)


@given(st.floats(-100, 100), st.floats(-10, 1))
def test_being_cut_never_pays(reward, coef):
    cut = stop_properly_penalty(np.array([reward]), np.array([True]), coef=coef)
    finished = stop_properly_penalty(np.array([reward]), np.array([False]), coef=coef)
    assert cut[0] <= finished[0] == reward


@pytest.mark.parametrize("coef", [1.1, float("nan")])
def test_stop_penalty_above_one_is_refused(coef):
    with pytest.raises(ValueError, match="at most 1"):
        stop_properly_penalty(np.zeros(1), np.ones(1, bool), coef=coef)


def test_token_rewards_are_the_incumbents(vectors, padded):
    case = vectors("reward_shaping")["compute_reward"]
    inputs, params = case["inputs"], case["params"]
    table = padded.of(inputs["mask"])
    result = token_rewards(
        np.clip(inputs["rewards"], *params["reward_clip_range"]),
        table.flat(inputs["kl"]),
        table.flat_mask,
        table.lengths,
        kl_coef=params["kl_coef"],
    )
    table.assert_close(result, case["expected"]["token_rewards"])
    assert not result[~table.flat_mask].any()


def test_the_reward_lands_on_the_last_action_and_nowhere_without_one():
    mask = np.array([0, 1, 1, 0, 0, 0], bool)
    result = token_rewards(np.array([3.0, 7.0]), None, mask, np.array([4, 2]))
    assert result.tolist() == [0, 0, 3, 0, 0, 0]


def test_a_negative_weight_means_no_penalty():
    result = token_rewards(np.ones(1), np.ones(2), np.ones(2, bool), np.array([2]), kl_coef=-0.5)
    assert result.tolist() == [0, 1]

"""GAE and returns: the incumbent's numbers, hand-made ones, and a second expression."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.algorithms import approx_kl, discounted_returns, gae, token_rewards

GAE_CASES = [f"openrlhf_{c}" for c in ("g1.0_l1.0", "g1.0_l0.95", "g0.99_l0.95", "g0.9_l0.0")]
RETURN_CASES = [f"openrlhf_g{g}_b{b}" for g in ("1.0", "0.9") for b in ("0.0", "0.1")]


@pytest.mark.parametrize("case_id", GAE_CASES)
def test_gae_with_decay_is_the_incumbents(vectors, padded, case_id):
    case = vectors("gae")[case_id]
    table = padded.of(case["inputs"]["mask"])
    advantages, returns = gae(
        table.flat(case["inputs"]["token_level_rewards"]),
        table.flat(case["inputs"]["values"]),
        table.flat_mask,
        table.lengths,
        gamma=case["params"]["gamma"],
        lam=case["params"]["lam"],
        spans="decay",
    )
    table.assert_close(advantages, case["expected"]["advantages"])
    table.assert_close(returns, case["expected"]["returns"])
    assert not advantages[~table.flat_mask].any()
    assert not returns[~table.flat_mask].any()


@pytest.mark.parametrize("case_id", RETURN_CASES)
def test_returns_with_kl_in_the_reward_are_the_incumbents(vectors, padded, case_id):
    case = vectors("returns_reinforce")[case_id]
    inputs, params = case["inputs"], case["params"]
    table = padded.of(inputs["mask"])
    kl = approx_kl(
        table.flat(inputs["log_probs"]), table.flat(inputs["ref_log_probs"]), params["kl_estimator"]
    )
    table.assert_close(kl, case["expected"]["kl"], atol=2e-7)
    rewards = np.clip(inputs["rewards"], *params["reward_clip_range"])
    per_token = token_rewards(
        rewards, kl, table.flat_mask, table.lengths, kl_coef=params["kl_coef"]
    )
    table.assert_close(per_token, case["expected"]["token_rewards"])
    returns = discounted_returns(
        per_token, table.flat_mask, table.lengths, gamma=params["gamma"], spans="decay"
    )
    table.assert_close(returns, case["expected"]["returns"])


def test_gae_across_a_span_by_hand():
    """Two actions, an observation of two tokens, two actions. gamma .9, lambda .8.

    carry: time is a1 a2 a5 a6. A6 = 2 - .2 = 1.8; A5 = .9*.2 - .3 + .72*1.8 = 1.176;
    A2 = .9*.3 - .4 + .72*1.176 = .71672; A1 = .9*.4 - .5 + .72*.71672 = .3760384.
    """
    mask = np.array([1, 1, 0, 0, 1, 1], bool)
    values = np.array([0.5, 0.4, 9.0, 9.0, 0.3, 0.2])
    rewards = np.array([0.0, 0.0, 5.0, 5.0, 0.0, 2.0])
    advantages, returns = gae(rewards, values, mask, np.array([6]), gamma=0.9, lam=0.8)
    expected = [0.3760384, 0.71672, 0.0, 0.0, 1.176, 1.8]
    np.testing.assert_allclose(advantages, expected, rtol=1e-12)
    np.testing.assert_allclose(returns, np.where(mask, np.array(expected) + values, 0), rtol=1e-12)


def test_multi_turn_numbers_of_the_incumbent_with_decay():
    mask = np.array([1, 1, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0], bool)
    kl = np.array([0.1, 0.2, 0, 0, 0.3, 0.4, 0.5, 0.6, 0.7, 0, 0, 0])
    values = np.array([0.5, 0.4, 9, 9, 0.3, 0.2, 0.1, 0.2, 0.3, 9, 9, 9])
    lengths = np.array([6, 6])
    per_token = token_rewards(np.array([1.0, -1.0]), kl, mask, lengths, kl_coef=0.1)
    advantages, _ = gae(per_token, values, mask, lengths, gamma=0.9, lam=0.8, spans="decay")
    expected = [-0.24488, -0.131778, 0.397200, 0.76, -0.673008, -0.9764, -1.37]
    np.testing.assert_allclose(advantages[mask], expected, atol=1e-6)
    returns = discounted_returns(per_token, mask, lengths, gamma=0.9, spans="decay")
    expected = [0.519187, 0.587986, 0.834, 0.96, -0.9707, -1.023, -1.07]
    np.testing.assert_allclose(returns[mask], expected, atol=1e-6)


def slow_gae(rewards, values, gamma, lam):
    """A_t as the sum over k of (gamma lam)^k delta_{t+k}, term by term."""
    steps = len(rewards)
    following = [*values[1:], 0.0]
    delta = [rewards[t] + gamma * following[t] - values[t] for t in range(steps)]
    return [sum((gamma * lam) ** k * delta[t + k] for k in range(steps - t)) for t in range(steps)]


numbers = st.floats(-5, 5)
unit = st.floats(0, 1)


@st.composite
def batches(draw):
    lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    size = sum(lengths)
    arrays = [np.array(draw(st.lists(numbers, min_size=size, max_size=size))) for _ in range(2)]
    mask = np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)), bool)
    return np.array(lengths), *arrays, mask


@given(batches(), unit, unit)
def test_carry_is_gae_of_the_policys_own_tokens(batch, gamma, lam):
    lengths, rewards, values, mask = batch
    advantages, returns = gae(rewards, values, mask, lengths, gamma=gamma, lam=lam)
    for start, length in zip(np.cumsum(lengths) - lengths, lengths, strict=True):
        row = slice(start, start + length)
        own = mask[row]
        expected = slow_gae(list(rewards[row][own]), list(values[row][own]), gamma, lam)
        np.testing.assert_allclose(advantages[row][own], expected, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(returns[mask], (advantages + values)[mask], atol=1e-12)
    assert not advantages[~mask].any()


@given(batches(), unit)
def test_returns_are_gae_with_lambda_one_and_no_critic(batch, gamma):
    lengths, rewards, _, mask = batch
    advantages, _ = gae(rewards, np.zeros(len(mask)), mask, lengths, gamma=gamma, lam=1.0)
    returns = discounted_returns(rewards, mask, lengths, gamma=gamma)
    np.testing.assert_allclose(returns, advantages, rtol=1e-10, atol=1e-10)


@given(batches(), unit, unit)
def test_both_rules_agree_without_spans(batch, gamma, lam):
    lengths, rewards, values, _ = batch
    # The prompt first, then actions up to the end: no span between actions.
    mask = np.concatenate([np.arange(n) >= n // 2 for n in lengths])
    one = gae(rewards, values, mask, lengths, gamma=gamma, lam=lam, spans="carry")
    two = gae(rewards, values, mask, lengths, gamma=gamma, lam=lam, spans="decay")
    np.testing.assert_allclose(one, two, rtol=1e-12, atol=1e-12)


@given(batches(), unit, unit)
def test_numbers_off_the_mask_do_not_matter(batch, gamma, lam):
    lengths, rewards, values, mask = batch
    poisoned = [np.where(mask, x, np.nan) for x in (rewards, values)]
    for spans in ("carry", "decay"):
        one = gae(rewards, values, mask, lengths, gamma=gamma, lam=lam, spans=spans)
        two = gae(*poisoned, mask, lengths, gamma=gamma, lam=lam, spans=spans)
        np.testing.assert_array_equal(one, two)

"""Every estimator: the incumbent's numbers, exact zeros, missing scores, refusals."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.algorithms import (
    ESTIMATORS,
    AdvantageInputs,
    AdvantageSettings,
    compute_advantages,
    group_stats,
)

INCUMBENT = {"std_eps": 1e-9, "clip_after_baseline": True, "spans": "decay"}
"""The settings that give the incumbent's numbers."""

A2 = {
    "reinforce": [
        0.258199,
        -0.774597,
        -0.774597,
        -0.774597,
        0.258199,
        0.258199,
        -0.774597,
        2.32379,
    ],
    "reinforce_baseline": [
        *(0.904534, -0.301511, -0.301511, -0.301511),
        *(-0.301511, -0.301511, -1.507557, 2.110579),
    ],
    "rloo": [1, -0.333333, -0.333333, -0.333333, -0.333333, -0.333333, -1.666667, 2.333333],
    "group_norm": [1.5, -0.5, -0.5, -0.5, -0.198680, -0.198680, -0.993399, 1.390759],
    "dr_grpo": [0.75, -0.25, -0.25, -0.25, -0.25, -0.25, -1.25, 1.75],
    "flash_reinforce": [0.25, -0.75, -0.75, -0.75, 0.25, 0.25, -0.75, 2.25],
}


def batch(rewards, lengths=2, n=4, prompt=1, **more):
    """Samples of a prompt token and `lengths` action tokens; groups of n neighbours."""
    rewards = np.asarray(rewards, dtype=np.float64)
    actions = np.broadcast_to(lengths, len(rewards))
    mask = np.concatenate([np.arange(prompt + a) >= prompt for a in actions]).astype(bool)
    return AdvantageInputs(
        lengths=actions + prompt,
        action_mask=mask,
        rewards=rewards,
        groups=np.arange(len(rewards)) // n,
        **more,
    )


def by_sample(inputs, flat):
    """The first action token's number of each sample."""
    starts = np.cumsum(inputs.lengths) - inputs.lengths
    return flat[starts + 1]


@pytest.mark.parametrize(
    "case_id",
    [
        "rloo",
        "dr_grpo",
        "group_norm",
        "reinforce_baseline",
        "reinforce",
        "reinforce_baseline_no_std_norm",
    ],
)
def test_group_vectors(vectors, case_id):
    case = vectors("advantages_group")[f"openrlhf_{case_id}"]
    lengths = np.concatenate(case["inputs"]["response_lengths"])
    inputs = batch(np.concatenate(case["inputs"]["group_rewards"]), lengths=lengths)
    settings = AdvantageSettings(
        estimator=case["params"]["estimator"],
        no_std_norm=case["params"]["no_std_norm"],
        **INCUMBENT,
    )
    result = compute_advantages(inputs, settings)
    for sample, expected in enumerate(case["expected"]["token_advantages"]):
        start = np.sum(inputs.lengths[:sample]) + 1
        actual = result.advantages[start : start + lengths[sample]]
        np.testing.assert_allclose(actual, expected[: lengths[sample]], rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("estimator", A2)
def test_numbers_of_two_groups(estimator):
    inputs = batch([1, 0, 0, 0, 1, 1, 0, 3])
    result = compute_advantages(inputs, AdvantageSettings(estimator=estimator, **INCUMBENT))
    np.testing.assert_allclose(by_sample(inputs, result.advantages), A2[estimator], atol=1e-6)
    np.testing.assert_allclose(result.group_reward_std, [0.5] * 4 + [1.258306] * 4, atol=1e-6)


@pytest.mark.parametrize(
    ("estimator", "rewards", "clip", "after", "expected"),
    [
        ("group_norm", [5, 0, 0, 0], (-1, 1), True, [1, -0.5, -0.5, -0.5]),
        ("group_norm", [5, 0, 0, 0], (-1, 1), False, [1.5, -0.5, -0.5, -0.5]),
        ("dr_grpo", [30, 0, 0, 0], (-10, 10), True, [10, -7.5, -7.5, -7.5]),
        ("dr_grpo", [30, 0, 0, 0], (-10, 10), False, [7.5, -2.5, -2.5, -2.5]),
        ("dr_grpo", [30, 0, 0, 0], None, False, [22.5, -7.5, -7.5, -7.5]),
    ],
)
def test_clip_acts_on_rewards_or_on_what_the_baseline_left(
    estimator, rewards, clip, after, expected
):
    settings = AdvantageSettings(
        estimator=estimator, clip_range=clip, clip_after_baseline=after, std_eps=1e-9
    )
    inputs = batch(rewards)
    result = compute_advantages(inputs, settings)
    np.testing.assert_allclose(by_sample(inputs, result.advantages), expected, rtol=1e-6)
    # The metric is of the rewards as they came, whatever the clip does to them.
    np.testing.assert_allclose(result.group_reward_std, rewards[0] / 2)


def test_gae_is_whitened_over_action_tokens_only():
    inputs = batch([1.0, -1.0], n=1, values=np.array([99.0, 0.1, 0.2, 99.0, 0.3, 0.4]))
    result = compute_advantages(inputs, AdvantageSettings(lam=0.5))
    raw = np.array([0.1 + 0.5 * 0.8, 0.8, 0.1 + 0.5 * -1.4, -1.4])
    expected = (raw - raw.mean()) / raw.std()
    np.testing.assert_allclose(result.advantages[inputs.action_mask], expected, rtol=1e-6)
    expected_returns = raw + np.array([0.1, 0.2, 0.3, 0.4])
    np.testing.assert_allclose(result.returns[inputs.action_mask], expected_returns, rtol=1e-6)


def test_kl_penalty_lowers_every_token_and_the_return():
    kl = np.array([9.0, 0.1, 0.3])
    inputs = batch([2.0], n=1, kl=kl)
    result = compute_advantages(inputs, AdvantageSettings(estimator="flash_reinforce", kl_coef=0.5))
    np.testing.assert_allclose(result.token_rewards, [0.0, -0.05, -0.15], rtol=1e-6)
    np.testing.assert_allclose(result.sequence_returns, [-0.2], rtol=1e-6)


@pytest.mark.parametrize("estimator", [e for e in ESTIMATORS if e not in ("gae", "reinforce")])
@given(reward=st.floats(-9, 9), n=st.integers(2, 9), tokens=st.integers(1, 4))
def test_equal_rewards_have_advantage_exactly_zero(estimator, reward, n, tokens):
    inputs = batch([reward] * n, n=n, lengths=tokens)
    result = compute_advantages(inputs, AdvantageSettings(estimator=estimator))
    assert not result.advantages.any()


@pytest.mark.parametrize("estimator", ["rloo", "reinforce_baseline", "group_norm", "dr_grpo"])
@given(st.lists(st.floats(-9, 9), min_size=4, max_size=4), st.permutations(range(8)))
def test_groups_need_not_be_neighbours(estimator, rewards, order):
    inputs = batch([*rewards, 1.0, 2.0, 3.0, 5.0])
    order = np.array(order)
    shuffled = batch(inputs.rewards[order])
    shuffled = AdvantageInputs(
        lengths=shuffled.lengths,
        action_mask=shuffled.action_mask,
        rewards=shuffled.rewards,
        groups=inputs.groups[order],
    )
    settings = AdvantageSettings(estimator=estimator)
    one = by_sample(inputs, compute_advantages(inputs, settings).advantages)
    two = by_sample(shuffled, compute_advantages(shuffled, settings).advantages)
    np.testing.assert_allclose(one[order], two, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("estimator", list(ESTIMATORS))
def test_a_sample_without_score_leaves_no_trace(estimator):
    values = np.linspace(0, 1, 12)
    full = batch([1.0, 0.0, np.nan, 3.0], scored=np.array([1, 1, 0, 1], bool), values=values)
    keep = np.repeat(np.array([1, 1, 0, 1], bool), 3)
    rest = AdvantageInputs(
        lengths=full.lengths[:3],
        action_mask=full.action_mask[keep],
        rewards=full.rewards[[0, 1, 3]],
        groups=full.groups[:3],
        values=values[keep],
    )
    settings = AdvantageSettings(estimator=estimator)
    one, two = compute_advantages(full, settings), compute_advantages(rest, settings)
    np.testing.assert_array_equal(one.advantages[keep], two.advantages)
    assert not one.advantages[~keep].any()
    assert one.usable.tolist() == [True, True, False, True]
    np.testing.assert_array_equal(one.group_reward_std[[0, 1, 3]], two.group_reward_std)


def test_a_sample_without_action_tokens_is_not_part_of_the_baseline():
    inputs = AdvantageInputs(
        lengths=np.array([2, 2, 2]),
        action_mask=np.array([0, 1, 0, 0, 0, 1], bool),
        rewards=np.array([1.0, 100.0, 0.0]),
        groups=np.zeros(3, int),
    )
    result = compute_advantages(inputs, AdvantageSettings(estimator="dr_grpo"))
    assert result.usable.tolist() == [True, False, True]
    np.testing.assert_allclose(result.advantages, [0, 0.5, 0, 0, 0, -0.5])


def test_the_last_scored_member_of_a_group_learns_nothing():
    inputs = batch([1.0, 2.0], n=2, scored=np.array([True, False]))
    for estimator in ("rloo", "group_norm", "dr_grpo"):
        assert not compute_advantages(
            inputs, AdvantageSettings(estimator=estimator)
        ).advantages.any()


def test_large_offsets_do_not_hide_small_differences():
    """1e8 + {0, 1}: float32 statistics would see equal rewards."""
    inputs = batch([1e8, 1e8 + 1, 1e8, 1e8 + 1])
    settings = AdvantageSettings(estimator="group_norm", clip_range=None)
    advantages = by_sample(inputs, compute_advantages(inputs, settings).advantages)
    np.testing.assert_allclose(advantages, [-0.866024, 0.866024, -0.866024, 0.866024], rtol=2e-6)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=8))
def test_group_statistics_are_numpys(rewards):
    stats = group_stats(np.array(rewards), np.zeros(len(rewards), int), np.ones(len(rewards), bool))
    np.testing.assert_allclose(stats.mean, np.mean(rewards), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(stats.std, np.std(rewards, ddof=1), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"estimator": "grpo"}, "unknown; there are gae, reinforce"),
        ({"gamma": 1.5}, "gamma is 1.5"),
        ({"gamma": float("nan")}, "gamma is nan"),
        ({"lam": -0.1}, "lam is -0.1"),
        ({"estimator": "rloo", "gamma": 0.9}, "needs gamma 1"),
        ({"clip_range": (1, 1)}, "low < high"),
        ({"kl_coef": float("inf")}, "kl_coef is inf"),
        ({"std_eps": -1.0}, "std_eps is -1"),
    ],
)
def test_settings_without_meaning_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        AdvantageSettings(**settings)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rewards": [np.nan, 1.0]}, r"rewards\[0\] is nan"),
        ({"rewards": [1.0, np.inf]}, r"rewards\[1\] is inf"),
        ({"values": np.array([0, np.nan, 0, 0, 0, 0])}, r"values\[1\] is nan"),
        ({"kl": np.array([0, 0, 0, 0, 0, np.inf])}, r"kl\[5\] is inf"),
        ({"kl": np.zeros(5)}, r"kl has shape \(5,\); it must be \(6,\)"),
        ({"values": None}, "values is missing"),
    ],
)
def test_bad_numbers_are_named(change, words):
    inputs = {"rewards": [1.0, 2.0], "values": np.zeros(6), **change}
    with pytest.raises(ValueError, match=words):
        compute_advantages(batch(inputs.pop("rewards"), n=1, **inputs), AdvantageSettings())


def test_a_float_mask_is_refused():
    inputs = batch([1.0])
    wrong = AdvantageInputs(
        lengths=inputs.lengths,
        action_mask=inputs.action_mask.astype(np.float32),
        rewards=inputs.rewards,
        groups=inputs.groups,
    )
    with pytest.raises(ValueError, match="must be bool"):
        compute_advantages(wrong, AdvantageSettings(estimator="reinforce"))

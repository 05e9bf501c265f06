"""Every estimator, with every setting, against plain loops over random ragged batches."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet.algorithms import (
    ESTIMATORS,
    AdaptiveKlController,
    AdvantageInputs,
    AdvantageSettings,
    FilterVerdict,
    GroupFilter,
    approx_kl,
    compute_advantages,
    overlong_penalty,
    pass_at_k,
    stop_properly_penalty,
)
from tests.reference import advantages as plain

NUMBERS = st.one_of(
    st.sampled_from([0.0, 1.0, -1.0, 0.1, 0.3, 1e-3, -0.7, 5.0]),
    st.floats(-20, 20).map(lambda x: round(x, 3)),
)
UNIT = st.one_of(st.sampled_from([0.0, 1.0, 0.9, 0.99]), st.floats(0, 1).map(lambda x: round(x, 2)))
TOKENS = st.builds(plain.Token, action=st.booleans(), kl=NUMBERS, value=NUMBERS)
CASES = st.lists(
    st.builds(
        plain.Case,
        tokens=st.lists(TOKENS, min_size=1, max_size=6).map(tuple),
        reward=NUMBERS,
        group=st.integers(0, 2),
        scored=st.sampled_from([True, True, True, False]),
    ),
    min_size=1,
    max_size=8,
)


@st.composite
def recipes(draw, estimator):
    discounts = ESTIMATORS[estimator].uses_gamma
    low = draw(st.sampled_from([-10.0, -1.0, 0.0]))
    return plain.Recipe(
        estimator=estimator,
        gamma=draw(UNIT) if discounts else 1.0,
        lam=draw(UNIT),
        no_std_norm=draw(st.booleans()),
        kl_coef=draw(st.sampled_from([0.0, 0.01, 0.5, -0.1])),
        clip=(low, low + draw(st.sampled_from([0.5, 2.0, 20.0]))),
        clip_after=draw(st.booleans()),
        decay=draw(st.booleans()),
        eps=draw(st.sampled_from([0.0, 1e-9, 1e-6, 1e-4])),
    )


def settings_of(recipe: plain.Recipe) -> AdvantageSettings:
    return AdvantageSettings(
        estimator=recipe.estimator,
        gamma=recipe.gamma,
        lam=recipe.lam,
        no_std_norm=recipe.no_std_norm,
        kl_coef=recipe.kl_coef,
        clip_range=recipe.clip,
        clip_after_baseline=recipe.clip_after,
        spans="decay" if recipe.decay else "carry",
        std_eps=recipe.eps,
    )


def inputs_of(cases: list[plain.Case], *, poison: bool = False) -> AdvantageInputs:
    """`poison` puts NaN wherever nothing may look: off the mask, and on what is left out."""
    tokens = [(case, token) for case in cases for token in case.tokens]

    def flat(name: str) -> np.ndarray:
        return np.array(
            [
                np.nan if poison and not (t.action and c.usable) else getattr(t, name)
                for c, t in tokens
            ]
        )

    return AdvantageInputs(
        lengths=np.array([len(case.tokens) for case in cases]),
        action_mask=np.array([t.action for _, t in tokens]),
        rewards=np.array([np.nan if poison and not c.usable else c.reward for c in cases]),
        groups=np.array([case.group for case in cases]) * 1000 - 7,
        scored=np.array([case.scored for case in cases]),
        kl=flat("kl"),
        values=flat("value"),
    )


@pytest.mark.parametrize("estimator", list(ESTIMATORS))
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_estimator(estimator, data):
    recipe = data.draw(recipes(estimator))
    cases = data.draw(CASES)
    gains, returns = plain.advantages(cases, recipe)
    result = compute_advantages(inputs_of(cases, poison=True), settings_of(recipe))
    expected = np.concatenate([np.array(row) for row in gains])
    # Means and deviations of the batch are sums of many numbers: a few last bits of their size.
    tight = {"rtol": 2e-6, "atol": 1e-6 * (1.0 + np.abs(expected).max())}
    if ESTIMATORS[estimator].whiten and not recipe.no_std_norm:
        tight["atol"] = 3e-6
    np.testing.assert_allclose(result.advantages, expected, **tight)
    np.testing.assert_allclose(
        result.returns, np.concatenate([np.array(row) for row in returns]), rtol=2e-6, atol=2e-5
    )
    assert result.usable.tolist() == [case.usable for case in cases]
    assert np.isfinite(result.advantages).all()


@pytest.mark.parametrize("estimator", list(ESTIMATORS))
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_order_of_samples_and_any_padding(estimator, data):
    recipe = data.draw(recipes(estimator))
    cases = data.draw(CASES)
    order = data.draw(st.permutations(range(len(cases))))
    pad = data.draw(st.integers(0, 3))

    def by_action(batch: list[plain.Case]) -> list[list[float]]:
        result = compute_advantages(inputs_of(batch), settings_of(recipe))
        rows = np.split(result.advantages, np.cumsum([len(c.tokens) for c in batch])[:-1])
        masks = [[t.action for t in c.tokens] for c in batch]
        return [row[np.array(mask)].tolist() for row, mask in zip(rows, masks, strict=True)]

    padding = (plain.Token(action=False, kl=3.0, value=9.0),) * pad
    moved = [
        plain.Case(c.tokens + padding, c.reward, c.group, c.scored)
        for c in (cases[i] for i in order)
    ]
    one, two = by_action(cases), by_action(moved)
    for place, i in enumerate(order):
        np.testing.assert_allclose(two[place], one[i], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("estimator", list(ESTIMATORS))
def test_equal_rewards_teach_exactly_nothing(estimator):
    """Nothing but 0, whatever a mean was rounded to; here the batch is one group."""
    token = (plain.Token(action=True, value=0.25),)
    rewards, sizes = (0.1, 0.3, 1 / 3, -7.7, 9.999999, 0.0), (2, 3, 6, 8, 16, 64)
    for reward, n, no_std_norm in itertools.product(rewards, sizes, (False, True)):
        batch = [plain.Case(token, reward, 0) for _ in range(n)]
        settings_ = AdvantageSettings(estimator=estimator, no_std_norm=no_std_norm)
        assert not compute_advantages(inputs_of(batch), settings_).advantages.any()


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.float32, np.float64, np.bool_])
def test_rewards_of_any_number_type(dtype):
    """0 and 1 as integers, floats or truth values are the same rewards."""
    batch = [plain.Case((plain.Token(True),), r, 0) for r in (1, 0, 0, 1)]
    inputs = inputs_of(batch)
    object.__setattr__(inputs, "rewards", np.array([1, 0, 0, 1]).astype(dtype))
    result = compute_advantages(inputs, AdvantageSettings(estimator="group_norm"))
    np.testing.assert_allclose(
        result.advantages, np.array([1, -1, -1, 1]) * np.sqrt(0.75), rtol=3e-6
    )


@pytest.mark.parametrize("estimator", ["rloo", "reinforce_baseline", "group_norm", "dr_grpo"])
def test_a_group_of_one_teaches_nothing(estimator):
    batch = [plain.Case((plain.Token(True),), 3.0, g) for g in range(3)]
    result = compute_advantages(inputs_of(batch), AdvantageSettings(estimator=estimator))
    assert not result.advantages.any()


def test_nothing_usable_is_no_error():
    batch = [
        plain.Case((plain.Token(False),), 1.0, 0),
        plain.Case((plain.Token(True),), 1.0, 0, scored=False),
    ]
    for estimator in ESTIMATORS:
        result = compute_advantages(
            inputs_of(batch, poison=True), AdvantageSettings(estimator=estimator)
        )
        assert not result.advantages.any()
        assert not result.usable.any()


@settings(max_examples=150, deadline=None)
@given(
    d=st.one_of(st.floats(-60, 60), st.sampled_from([-1e4, 1e4, -20.0, 20.0, 0.0])),
    ref=st.floats(-30, 0),
    kind=st.sampled_from(["k1", "k2", "k3"]),
    bound_all=st.booleans(),
)
def test_kl_penalties(d, ref, kind, bound_all):
    logprob = ref + d
    ours = approx_kl(
        np.array([logprob]), np.array([ref]), kind, bounds="all" if bound_all else "k3"
    )
    expected = plain.kl_estimate(logprob, ref, kind, bound_all=bound_all)
    np.testing.assert_allclose(ours, [expected], rtol=1e-9, atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(
    rewards=st.lists(NUMBERS, min_size=1, max_size=6),
    lengths=st.lists(st.integers(0, 30), min_size=6, max_size=6),
    limit=st.integers(1, 20),
    share=st.floats(0.01, 1.0),
    factor=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
)
def test_overlong(rewards, lengths, limit, share, factor):
    buffer = limit * share
    ours = overlong_penalty(
        np.array(rewards),
        np.array(lengths[: len(rewards)]),
        max_new_tokens=limit,
        buffer_length=buffer,
        factor=factor,
    )
    expected = [
        plain.overlong(r, n, limit=limit, buffer=buffer, factor=factor)
        for r, n in zip(rewards, lengths, strict=False)
    ]
    np.testing.assert_allclose(ours, expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(
    reward=st.floats(-100, 100),
    finished=st.floats(-100, 100),
    coef=st.floats(-50, 1),
    legacy=st.booleans(),
)
def test_stop_properly(reward, finished, coef, legacy):
    """And: of two answers, the cut one never ranks higher than it did, whatever its reward."""
    ours = stop_properly_penalty(
        np.array([reward, reward, finished]),
        np.array([True, False, False]),
        coef=coef,
        legacy=legacy,
    )
    expected = plain.stop_properly(reward, cut=True, coef=coef, legacy=legacy)
    np.testing.assert_allclose(ours, [expected, reward, finished], rtol=1e-12, atol=1e-300)
    if not legacy:
        assert ours[0] <= reward
        if reward <= finished:
            assert ours[0] <= ours[2]


@given(
    st.lists(st.tuples(st.floats(-5, 50), st.integers(0, 5000)), max_size=12),
    st.floats(0.01, 10),
    st.integers(1, 20000),
)
def test_adaptive_control(updates, target, horizon):
    controller = AdaptiveKlController(0.02, target=target, horizon=horizon)
    values = []
    for kl, samples in updates:
        controller.update(kl, samples)
        values.append(controller.coef)
    np.testing.assert_allclose(values, plain.adaptive_kl(0.02, updates, target, horizon), rtol=1e-9)


@given(
    st.integers(1, 40).flatmap(
        lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))
    )
)
def test_passes(numbers):
    n, c, k = numbers
    assert pass_at_k(n, c, k) == pytest.approx(
        float(plain.pass_at_k(n, c, k)), rel=1e-12, abs=1e-15
    )


@given(
    scores=st.lists(st.one_of(st.none(), st.sampled_from([0.0, 1.0, 0.1, 0.5])), max_size=6),
    low=st.sampled_from([0.0, -1.0, 0.2]),
    width=st.sampled_from([0.5, 0.8, 2.0]),
    mean_only=st.booleans(),
)
def test_filter(scores, low, width, mean_only):
    known = [s for s in scores if s is not None]
    verdict = GroupFilter(low=low, high=low + width, mean_only=mean_only).verdict(scores)
    inside = bool(known) and low < sum(known) / len(known) < low + width
    spread = mean_only or len(set(known)) > 1
    assert (verdict is FilterVerdict.KEEP) == (inside and spread)

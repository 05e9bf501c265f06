"""KL estimators and controllers."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.algorithms import (
    AdaptiveKlController,
    FixedKlController,
    approx_kl,
    make_kl_controller,
)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_incumbents_numbers(vectors, estimator):
    case = vectors("kl_estimators")[f"openrlhf_{estimator}"]
    logprobs, ref = (np.array(case["inputs"][name]) for name in ("log_probs", "ref_log_probs"))
    kl = approx_kl(logprobs, ref, estimator, bounds="all")
    np.testing.assert_allclose(kl, case["expected"]["kl"], rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [-10, -10, -1, -0.1, 0, 0.1, 1, 10, 10]),
        ("k2", [10, 10, 0.5, 0.005, 0, 0.005, 0.5, 10, 10]),
        ("k3", [10, 10, 0.718282, 0.005171, 0, 0.004837, 0.367879, 9.000046, 10]),
    ],
)
def test_incumbents_bounds(estimator, expected):
    difference = np.array([-30, -10, -1, -0.1, 0, 0.1, 1, 10, 30])
    kl = approx_kl(difference, np.zeros(9), estimator, bounds="all")
    np.testing.assert_allclose(kl, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", [-30, -2, 30]), ("k2", [450, 2, 450]), ("k3", [10, 4.389056, 10])],
)
def test_only_k3_is_bounded(estimator, expected):
    kl = approx_kl(np.array([-30.0, -2.0, 30.0]), np.zeros(3), estimator)
    np.testing.assert_allclose(kl, expected, rtol=1e-6, atol=0 if estimator != "k3" else 3e-6)


def test_reports_are_not_bounded():
    assert approx_kl(np.array([30.0]), np.zeros(1), "k1", bounds="none") == 30.0
    assert np.isfinite(approx_kl(np.array([-1e4]), np.zeros(1), "k3", bounds="none")).all()


@given(st.floats(-20, 20), st.floats(-5, 5))
def test_k3_by_the_exponential_and_never_negative(logprob, ref):
    kl = approx_kl(np.array([logprob]), np.array([ref]), "k3", bounds="none")
    if ref - logprob < 20:
        ratio = math.exp(ref - logprob)
        np.testing.assert_allclose(kl, ratio - 1 - (ref - logprob), rtol=1e-9, atol=1e-9)
    assert kl >= 0.0


@given(st.lists(st.floats(0.05, 1), min_size=2, max_size=6), st.integers(0, 99))
def test_k1_and_k3_are_unbiased(weights, seed):
    """The expectation under p of k1, and of k3, is KL(p || q)."""
    p = np.array(weights) / np.sum(weights)
    q = np.random.default_rng(seed).dirichlet(np.ones(len(p))) * 0.9 + 0.1 / len(p)
    exact = float(np.sum(p * np.log(p / q)))
    for estimator in ("k1", "k3"):
        kl = approx_kl(np.log(p), np.log(q), estimator, bounds="none")
        assert math.isclose(float(np.sum(p * kl)), exact, rel_tol=1e-9, abs_tol=1e-12)


def test_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="k1, k2 and k3"):
        approx_kl(np.zeros(1), np.zeros(1), "k4")  # type: ignore[arg-type]


def test_adaptive_controller_follows_the_incumbents_numbers(vectors):
    case = vectors("reward_shaping")["adaptive_kl"]
    params = case["params"]
    controller = AdaptiveKlController(
        params["init"], target=params["target"], horizon=params["horizon"]
    )
    values = []
    for kl, samples in case["inputs"]["updates"]:
        controller.update(kl, samples)
        values.append(controller.coef)
    np.testing.assert_allclose(values, case["expected"]["values_after_each"], rtol=2e-6)


@pytest.mark.parametrize(
    ("kl", "expected"), [(0.5, 0.097952), (6, 0.1), (7, 0.10170667), (100, 0.102048)]
)
def test_adaptive_controller_single_steps(kl, expected):
    controller = AdaptiveKlController(0.1, target=6.0, horizon=10000)
    controller.update(kl, 1024)
    assert math.isclose(controller.coef, expected, rel_tol=1e-6)


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(0, 10**7)), max_size=20))
def test_adaptive_coefficient_stays_positive_and_finite(updates):
    controller = AdaptiveKlController(0.01, target=0.1, horizon=100)
    for kl, samples in updates:
        controller.update(kl, samples)
        assert math.isfinite(controller.coef)
        assert controller.coef > 0


@pytest.mark.parametrize("kl", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("target", [None, 0.5])
def test_a_bad_kl_is_refused_and_changes_nothing(kl, target):
    controller = make_kl_controller(0.02, target=target)
    with pytest.raises(ValueError, match="left as it is"):
        controller.update(kl, 8)
    assert controller.coef == 0.02


def test_state_survives_a_restart():
    one = make_kl_controller(0.02, target=0.5, horizon=100)
    one.update(3.0, 50)
    two = make_kl_controller(0.02, target=0.5, horizon=100)
    two.load_state_dict(one.state_dict())
    assert two.coef == one.coef != 0.02


def test_a_fixed_weight_is_that_of_the_flag_also_after_a_restart():
    fixed = FixedKlController(0.02)
    fixed.load_state_dict({"coef": 0.03})
    assert fixed.coef == 0.02


@pytest.mark.parametrize(
    "arguments",
    [(0.0, 1.0, 1.0), (0.1, 0.0, 1.0), (0.1, 1.0, 0.0), (math.nan, 1.0, 1.0), (0.1, -1.0, 1.0)],
)
def test_adaptive_controller_refuses_what_would_break_it(arguments):
    coef, target, horizon = arguments
    with pytest.raises(ValueError, match="above 0"):
        AdaptiveKlController(coef, target=target, horizon=horizon)


def test_fixed_controller_refuses_bad_weights_and_keeps_its_own():
    for bad in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match="not negative"):
            FixedKlController(bad)
    controller = FixedKlController(0.0)
    controller.update(1.0, 10)
    assert controller.coef == 0.0
    with pytest.raises(ValueError, match="num_samples"):
        controller.update(1.0, -1)
    with pytest.raises(ValueError, match="not negative"):
        controller.load_state_dict({"coef": math.nan})

from __future__ import annotations

import math

import pytest

from quartet import config
from quartet.config.limits import LIMITS, Limit, check_limits
from quartet.config.load import build
from quartet.config.tree import leaves

ALL = [
    config.PpoConfig,
    config.SftConfig,
    config.RmConfig,
    config.DpoConfig,
    config.RolloutServeConfig,
    config.RewardServeConfig,
    config.RefServeConfig,
    config.LearnerServeConfig,
]


def is_number(type_name: str) -> bool:
    return type_name.startswith(("int", "float"))


@pytest.mark.parametrize("cls", ALL)
def test_every_number_has_a_limit(cls: type):
    numbers = [name for name, leaf in leaves(cls).items() if is_number(leaf.type_name)]
    assert [name for name in numbers if name not in LIMITS] == []


def test_every_limit_is_of_a_number():
    names = {name for cls in ALL for name, leaf in leaves(cls).items() if is_number(leaf.type_name)}
    assert set(LIMITS) - names == set()


@pytest.mark.parametrize("cls", ALL)
def test_defaults_are_within_limits(cls: type):
    assert list(check_limits(cls())) == []


def outside(limit: Limit, kind: str) -> list[float]:
    """Values just beyond each end."""
    step = 1 if kind.startswith("int") else 1e-6
    values: list[float] = []
    if limit.low > -math.inf:
        values.append(limit.low if limit.low_open else limit.low - step)
    if limit.high < math.inf:
        values.append(limit.high if limit.high_open else limit.high + step)
    if kind.startswith("float"):
        values.append(math.nan)
        values += [math.inf] if limit.high_open and limit.high == math.inf else []
    return [int(value) if kind.startswith("int") else value for value in values]


CASES = [
    (cls, name, value)
    for cls in ALL
    for name, leaf in leaves(cls).items()
    if name in LIMITS
    for value in outside(LIMITS[name], leaf.type_name)
    if value != LIMITS[name].also
]


@pytest.mark.parametrize(
    ("cls", "name", "value"), CASES, ids=[f"{c.__name__}-{n}-{v}" for c, n, v in CASES]
)
def test_outside_is_refused(cls: type, name: str, value: float):
    leaf = leaves(cls)[name]
    given = (value,) * 2 if leaf.is_sequence else value
    found = list(check_limits(build(cls, {name: given}, {})))
    assert [error.info.field for error in found] == [name]
    assert f"--{name} " in str(found[0])
    assert "must be" in str(found[0])
    assert found[0].info.remedy


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        (Limit(low=1), "at least 1"),
        (Limit(low=1, also=-1), "-1 or at least 1"),
        (Limit(low=0, low_open=True, high=1), "above 0 and at most 1"),
        (Limit(low=0, high=0.5, high_open=True), "at least 0 and below 0.5"),
        (Limit(low=0, high_open=True), "at least 0 and finite"),
        (Limit(low_open=True, high_open=True), "finite"),
    ],
)
def test_limits_in_words(limit: Limit, text: str):
    assert str(limit) == text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rollout.temperature", 0.0),
        ("actor.dual_clip", 1.0),
        ("algo.kl.target", -1.0),
        ("algo.kl.horizon", 0),
        ("ds.zero_stage", 7),
        ("vllm.num_engines", 0),
        ("ckpt.save_steps", 0),
        ("logger.logging_steps", 0),
        ("reward.overlong_buffer_len", 0.0),
        ("reward.stop_properly_penalty_coef", 1.5),
        ("train.async_queue_size", 0),
    ],
)
def test_what_openrlhf_accepts_although_it_is_broken(name: str, value: float):
    (error,) = check_limits(build(config.PpoConfig, {name: value}, {}))
    assert error.info.field == name


def test_infinite_where_it_means_something():
    assert list(check_limits(build(config.PpoConfig, {"ckpt.max_mem": math.inf}, {}))) == []


INTEGERS = [
    (cls, name)
    for cls in ALL
    for name, leaf in leaves(cls).items()
    if name in LIMITS and int in leaf.options and not math.isfinite(LIMITS[name].high)
]


@pytest.mark.parametrize(("cls", "name"), INTEGERS, ids=[f"{c.__name__}-{n}" for c, n in INTEGERS])
def test_integers_that_no_message_holds(cls: type, name: str):
    (error,) = check_limits(build(cls, {name: 10**20}, {}))
    assert error.info.field == name
    assert "is too large" in str(error)


@pytest.mark.parametrize(
    ("name", "largest"), [("train.seed", 2**32 - 1), ("push.bucket_bytes", 2**63 - 1)]
)
def test_the_largest_integers(name: str, largest: int):
    assert list(check_limits(build(config.PpoConfig, {name: largest}, {}))) == []
    (error,) = check_limits(build(config.PpoConfig, {name: largest + 1}, {}))
    assert str(error).endswith(f"(give at most {largest})")


def test_numbers_that_are_none():
    (error,) = check_limits(build(config.PpoConfig, {"reward.clip_range": (math.nan,) * 2}, {}))
    assert "must be finite" in str(error)
    assert "give numbers that are finite" in str(error)

"""The strict reader of reward answers."""

import math

import pytest
from quartet_reward.answer import read_answer

from quartet.errors import DataError
from quartet.types import Failure, Reward


def rewards_of(outcomes):
    return [o.reward if isinstance(o, Reward) else o.reason for o in outcomes]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        (0.5, [0.5]),
        (1, [1.0]),
        (True, [1.0]),
        ([0.25], [0.25]),
        ([[0.25]], [0.25]),
        ((-3.0,), [-3.0]),
        (0, [0.0]),
        ([math.nan], ["NOT_FINITE"]),
        ([-math.inf], ["NOT_FINITE"]),
        ([10**400], ["NOT_FINITE"]),
        ([1e30], ["OUT_OF_RANGE"]),
        ([-1e30], ["OUT_OF_RANGE"]),
        ([1e6], [1e6]),
        (["1.0"], ["NOT_A_NUMBER"]),
        ([None], ["NOT_A_NUMBER"]),
        ([{"value": 1}], ["NOT_A_NUMBER"]),
        ([[1.0, 2.0]], ["NOT_A_NUMBER"]),
    ],
)
def test_one_item(rewards, expected):
    assert rewards_of(read_answer({"rewards": rewards}, 1)) == expected


def test_one_bad_item_leaves_the_others():
    outcomes = read_answer({"rewards": [1.0, math.nan, 3.0]}, 3)
    assert rewards_of(outcomes) == [1.0, "NOT_FINITE", 3.0]
    failure = outcomes[1]
    assert isinstance(failure, Failure)
    assert failure.error_class == "DATA"
    assert failure.message == "reward is nan"


def test_scores_default_to_rewards_and_are_checked_too():
    [plain] = read_answer({"rewards": 2.0}, 1)
    [given] = read_answer({"rewards": 2.0, "scores": [0.5]}, 1)
    [bad] = read_answer({"rewards": 2.0, "scores": [math.inf]}, 1)
    assert plain == Reward(reward=2.0, score=2.0)
    assert given == Reward(reward=2.0, score=0.5)
    assert isinstance(bad, Failure)
    assert bad.message == "score is inf"


@pytest.mark.parametrize(
    ("answer", "num_items", "reason"),
    [
        ([1.0], 1, "BAD_ANSWER"),
        (None, 1, "BAD_ANSWER"),
        ("1.0", 1, "BAD_ANSWER"),
        ({}, 1, "BAD_ANSWER"),
        ({"reward": [1.0]}, 1, "BAD_ANSWER"),
        ({"rewards": None}, 1, "BAD_ANSWER"),
        ({"rewards": []}, 1, "WRONG_LENGTH"),
        ({"rewards": [1.0, 2.0]}, 1, "WRONG_LENGTH"),
        ({"rewards": 1.0}, 2, "WRONG_LENGTH"),
        ({"rewards": [1.0], "scores": [1.0, 2.0]}, 1, "WRONG_LENGTH"),
    ],
)
def test_answers_of_the_wrong_shape(answer, num_items, reason):
    with pytest.raises(DataError) as caught:
        read_answer(answer, num_items)
    assert caught.value.info.reason == reason


def test_extra_logs_of_every_form():
    logs = {"scalar": 0.5, "one": [0.25], "each": [1, 2], "flag": True}
    first, second = read_answer({"rewards": [1, 2], "extra_logs": logs}, 2)
    assert first.extra_logs == {"scalar": 0.5, "one": 0.25, "each": 1.0, "flag": 1.0}
    assert second.extra_logs == {"scalar": 0.5, "one": 0.25, "each": 2.0, "flag": 1.0}


def test_a_long_log_of_a_single_item_counts_by_its_first_value():
    [reward] = read_answer({"rewards": 1, "extra_logs": {"parts": [0.1, 0.2, 0.3]}}, 1)
    assert reward.extra_logs == {"parts": 0.1}


def test_a_broken_log_costs_the_log_and_not_the_sample(caplog):
    logs = {"good": 1.0, "nan": math.nan, "text": "high", "short": [1.0, 2.0]}
    outcomes = read_answer({"rewards": [1, 2, 3], "extra_logs": logs}, 3)
    assert [dict(o.extra_logs) for o in outcomes] == [{"good": 1.0}] * 3
    assert "extra_logs['nan']" in caplog.text
    assert "extra_logs['short']" in caplog.text


def test_the_bound_can_be_moved_but_not_past_float32():
    assert rewards_of(read_answer({"rewards": [1e30]}, 1, max_abs=math.inf)) == [1e30]
    assert rewards_of(read_answer({"rewards": [1e39]}, 1, max_abs=math.inf)) == ["OUT_OF_RANGE"]

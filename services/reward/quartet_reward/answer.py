"""The strict reading of `{"rewards", "scores", "extra_logs"}`.

A Python reward function and an HTTP endpoint answer in the same shape, so one reader judges both.
What is wrong becomes a typed failure; nothing is ever repaired into a number.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from quartet.errors import DataError
from quartet.types import Failure, Reward
from quartet_reward.scorer import Outcome

logger = logging.getLogger(__name__)

DEFAULT_MAX_ABS = 1e6
"""Largest reward believed. A reward beyond it is a bug of its maker (an uninitialised float, a sum
that ran away), and one such sample would be the whole signal of its group."""

FLOAT32_MAX = 3.4028234663852886e38
"""Rewards become float32 on their way to a learner: beyond this they would arrive as inf."""


def read_answer(answer: Any, num_items: int, *, max_abs: float = DEFAULT_MAX_ABS) -> list[Outcome]:
    """Read an answer for `num_items` items.

    Args:
        answer: plain JSON values. `rewards` is required, `scores` defaults to it, `extra_logs` maps
            names to a number for all items or to a list with one number an item.
        num_items: items that were asked for.
        max_abs: largest absolute value of a reward or score.

    Returns:
        A reward or a failure for each item, in order.

    Raises:
        DataError: the shape is wrong (BAD_ANSWER, WRONG_LENGTH), so no item can be told apart.
    """
    if not isinstance(answer, Mapping):
        raise DataError(
            f"the answer is {_describe(answer)}, not a dict",
            reason="BAD_ANSWER",
            remedy='return {"rewards": ..., "scores": ..., "extra_logs": {...}}',
        )
    if answer.get("rewards") is None:
        keys = ", ".join(sorted(map(str, answer))) or "none"
        raise DataError(f"the answer has no 'rewards' (its keys: {keys})", reason="BAD_ANSWER")
    rewards = _column(answer["rewards"], "rewards", num_items)
    scores = rewards
    if answer.get("scores") is not None:
        scores = _column(answer["scores"], "scores", num_items)
    logs = _extra_logs(answer.get("extra_logs"), num_items)
    return [
        _outcome(reward, score, extra, max_abs)
        for reward, score, extra in zip(rewards, scores, logs, strict=True)
    ]


def _outcome(reward: Any, score: Any, extra: Mapping[str, float], max_abs: float) -> Outcome:
    try:
        return Reward(
            reward=_number(reward, "reward", max_abs),
            score=_number(score, "score", max_abs),
            extra_logs=extra,
        )
    except DataError as error:
        return Failure(
            error_class=error.error_class, reason=error.info.reason, message=error.message
        )


def _column(values: Any, name: str, num_items: int) -> Sequence[Any]:
    """One value an item. A lone number stands for a list of one."""
    column = values if isinstance(values, list | tuple) else [values]
    if len(column) != num_items:
        raise DataError(
            f"'{name}' has {len(column)} value(s) for {num_items} item(s)", reason="WRONG_LENGTH"
        )
    return column


def _number(value: Any, name: str, max_abs: float) -> float:
    number = _as_float(value)
    if number is None:
        raise DataError(f"{name} is {_describe(value)}, not a number", reason="NOT_A_NUMBER")
    if not math.isfinite(number):
        raise DataError(f"{name} is {number}", reason="NOT_FINITE")
    if abs(number) > min(max_abs, FLOAT32_MAX):
        raise DataError(f"{name} is {number:g}, beyond {max_abs:g}", reason="OUT_OF_RANGE")
    return number


def _as_float(value: Any) -> float | None:
    """A number, or a list of one (what a (n, 1) tensor becomes); None for anything else."""
    while isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if not isinstance(value, int | float):  # bool is an int: True is 1.0
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _extra_logs(logs: Any, num_items: int) -> list[dict[str, float]]:
    """Split logs by item. An entry that is no finite number is left out, and said so.

    Logs are for the eye: a broken one must not cost a sample that has a good reward.
    """
    split: list[dict[str, float]] = [{} for _ in range(num_items)]
    if logs is None:
        return split
    if not isinstance(logs, Mapping):
        _warn_once("extra_logs", f"a {type(logs).__name__} and no dict")
        return split
    for name, values in logs.items():
        for row, value in zip(split, _spread(values, num_items), strict=True):
            number = _as_float(value)
            if number is None or not math.isfinite(number):
                problem = "no number for each item" if number is None else "not finite"
                _warn_once(f"extra_logs[{name!r}]", problem)
            else:
                row[str(name)] = number
    return split


@lru_cache(maxsize=256)  # what is broken in one sample is broken in thousands
def _warn_once(what: str, problem: str) -> None:
    logger.warning("%s is %s: left out (this is said once)", what, problem)


def _spread(values: Any, num_items: int) -> Sequence[Any]:
    """One value an item: as given, or the one that is given for all."""
    if not isinstance(values, list | tuple):
        return [values] * num_items
    if len(values) == num_items:
        return values
    if len(values) == 1 or (num_items == 1 and values):
        return [values[0]] * num_items
    return [None] * num_items


def _describe(value: Any) -> str:
    text = repr(value)
    return f"a {type(value).__name__} ({text if len(text) <= 40 else text[:37] + '...'})"

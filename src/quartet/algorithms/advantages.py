"""From rewards to advantages, for every estimator there is.

To add an estimator: write its baseline in `groups`, add one line to `ESTIMATORS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quartet.algorithms import groups as baselines
from quartet.algorithms.ragged import Bool, Float, Int, row_sums
from quartet.algorithms.returns import Spans, discounted_returns, gae
from quartet.algorithms.shaping import clip_rewards, token_rewards
from quartet.algorithms.whitening import whiten

Baseline = Callable[[Float, Int, Bool, float], Float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimator:
    """What makes an estimator: its baseline, and what comes after it."""

    baseline: Baseline
    """(rewards [B], groups [B], usable [B], std_eps) -> shaped rewards [B]."""
    whiten: bool = False
    """Normalise the advantages over all action tokens of the batch."""
    needs_group: bool = False
    """Needs at least 2 samples of a prompt."""
    needs_critic: bool = False
    """Needs values; its advantages come from GAE instead of plain returns."""
    uses_gamma: bool = False
    """Takes a discount other than 1. Group baselines compare whole answers and do not."""


ESTIMATORS: dict[str, Estimator] = {
    "gae": Estimator(
        baseline=baselines.no_baseline, whiten=True, needs_critic=True, uses_gamma=True
    ),
    "reinforce": Estimator(baseline=baselines.no_baseline, whiten=True, uses_gamma=True),
    "rloo": Estimator(baseline=baselines.leave_one_out, needs_group=True),
    "reinforce_baseline": Estimator(baseline=baselines.group_mean, whiten=True, needs_group=True),
    "group_norm": Estimator(baseline=baselines.group_norm, needs_group=True),
    "dr_grpo": Estimator(baseline=baselines.group_mean, needs_group=True),
    "flash_reinforce": Estimator(baseline=baselines.batch_mean),
}
"""Every estimator by the name that `--algo.advantage.estimator` takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageSettings:
    """How to compute advantages; the flags of the same names say more."""

    estimator: str = "gae"
    gamma: float = 1.0
    lam: float = 1.0
    no_std_norm: bool = False
    """Where the estimator normalises over the batch: subtract the mean only."""
    kl_coef: float = 0.0
    """Weight of the KL penalty of each token; 0 or less means none."""
    clip_range: tuple[float, float] | None = (-10.0, 10.0)
    clip_after_baseline: bool = False
    """Clip what the baseline left, as the incumbent does, instead of the rewards themselves."""
    spans: Spans = "carry"
    std_eps: float = 1e-6
    """Added to a group's standard deviation before dividing by it."""

    def __post_init__(self) -> None:
        """Refuse what has no meaning.

        Raises:
            ValueError: naming the setting, its value and what is allowed.
        """
        if self.estimator not in ESTIMATORS:
            known = ", ".join(ESTIMATORS)
            raise ValueError(f"estimator {self.estimator!r} is unknown; there are {known}")
        for name, value in (("gamma", self.gamma), ("lam", self.lam)):
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name} is {value}; it must be between 0 and 1")
        if self.gamma != 1.0 and not ESTIMATORS[self.estimator].uses_gamma:
            raise ValueError(f"gamma is {self.gamma}; estimator {self.estimator!r} needs gamma 1")
        if self.clip_range is not None and not self.clip_range[0] < self.clip_range[1]:
            raise ValueError(f"clip_range {self.clip_range} must be (low, high) with low < high")
        if not np.isfinite(self.kl_coef):
            raise ValueError(f"kl_coef is {self.kl_coef}; it must be a finite number")
        if not (np.isfinite(self.std_eps) and self.std_eps >= 0.0):
            raise ValueError(f"std_eps is {self.std_eps}; it must be finite and not negative")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AdvantageInputs:
    """A rollout batch of B samples and N tokens."""

    lengths: NDArray[np.integer]  # [B]
    """Tokens of each sample, prompt included."""
    action_mask: Bool  # [N]
    rewards: NDArray[np.floating]  # [B]
    """Rewards after penalties; ignored where `scored` is False."""
    groups: NDArray[np.integer]  # [B]
    """Equal numbers are samples of the same prompt; any order."""
    scored: Bool | None = None  # [B]
    """Which samples have a reward; None means all."""
    kl: NDArray[np.floating] | None = None  # [N]
    """KL of each token, for the penalty inside the reward; None where KL is a loss, or absent."""
    values: NDArray[np.floating] | None = None  # [N]
    """Value of the state before each token; needed by estimators with a critic."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Advantages:
    """What the learner trains on, and what the log shows. Per-token arrays are 0 off the mask."""

    advantages: NDArray[np.float32]  # [N]
    returns: NDArray[np.float32]  # [N]
    token_rewards: NDArray[np.float32]  # [N]
    usable: Bool  # [B]
    """False for a sample that was left out: no reward, or no action token. Do not train on it."""
    sequence_returns: NDArray[np.float64]  # [B]
    """Sum of each sample's token rewards: the metric `return`."""
    group_reward_std: NDArray[np.float64]  # [B]
    """Standard deviation (n - 1) of the rewards of each sample's group, before the clip."""


def compute_advantages(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """Shape rewards, place them on tokens, and turn them into advantages and returns.

    Order: clip, baseline, placement on the last action token and KL penalty, returns or GAE,
    normalisation over the batch.

    Raises:
        ValueError: arrays do not fit each other, a usable number is not finite, or the estimator
            needs values and there are none.
    """
    estimator = ESTIMATORS[settings.estimator]
    _check(inputs, needs_values=estimator.needs_critic)
    mask, lengths = inputs.action_mask, inputs.lengths
    usable = row_sums(mask, lengths) > 0
    if inputs.scored is not None:
        usable &= inputs.scored
    mask = mask & np.repeat(usable, lengths)
    given = rewards = _finite("rewards", inputs.rewards, usable)
    kl = None if inputs.kl is None else _finite("kl", inputs.kl, mask)

    if not settings.clip_after_baseline:
        rewards = clip_rewards(rewards, settings.clip_range)
    groups = np.asarray(inputs.groups, dtype=np.int64)
    shaped = estimator.baseline(rewards, groups, usable, settings.std_eps)
    if settings.clip_after_baseline:
        shaped = clip_rewards(shaped, settings.clip_range)
    per_token = token_rewards(shaped, kl, mask, lengths, kl_coef=settings.kl_coef)

    if estimator.needs_critic:
        values = _finite("values", _present("values", inputs.values), mask)
        advantages, returns = gae(
            per_token,
            values,
            mask,
            lengths,
            gamma=settings.gamma,
            lam=settings.lam,
            spans=settings.spans,
        )
    else:
        returns = discounted_returns(
            per_token, mask, lengths, gamma=settings.gamma, spans=settings.spans
        )
        advantages = returns
    if estimator.whiten:
        advantages = whiten(advantages, mask, scale=not settings.no_std_norm)
    return Advantages(
        advantages=advantages.astype(np.float32),
        returns=returns.astype(np.float32),
        token_rewards=per_token.astype(np.float32),
        usable=usable,
        sequence_returns=row_sums(per_token, lengths),
        group_reward_std=baselines.group_stats(given, groups, usable).std,
    )


def _check(inputs: AdvantageInputs, *, needs_values: bool) -> None:
    """Refuse arrays that do not fit each other."""
    samples, tokens = len(inputs.lengths), int(np.sum(inputs.lengths))
    expected = {
        "action_mask": (inputs.action_mask, tokens),
        "rewards": (inputs.rewards, samples),
        "groups": (inputs.groups, samples),
        "scored": (inputs.scored, samples),
        "kl": (inputs.kl, tokens),
        "values": (inputs.values, tokens),
    }
    for name, (array, size) in expected.items():
        if array is not None and np.shape(array) != (size,):
            raise ValueError(f"{name} has shape {np.shape(array)}; it must be ({size},)")
    if inputs.action_mask.dtype != np.bool_:
        raise ValueError(f"action_mask is {inputs.action_mask.dtype}; it must be bool")
    if needs_values:
        _present("values", inputs.values)


def _present(name: str, array: NDArray[Any] | None) -> NDArray[Any]:
    if array is None:
        raise ValueError(f"{name} is missing; this estimator needs a critic")
    return array


def _finite(name: str, array: NDArray[np.floating], where: Bool) -> Float:
    """In float64, zeros outside `where`; refuse NaN and infinity inside it."""
    values = np.where(where, np.asarray(array, dtype=np.float64), 0.0)
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        raise ValueError(f"{name}[{bad[0]}] is {values[bad[0]]}; {bad.size} numbers are not finite")
    return values

"""From an experience to what the learners train on: penalties, KL, advantages."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from quartet.algorithms import (
    AdvantageInputs,
    AdvantageSettings,
    KlBounds,
    KlEstimator,
    approx_kl,
    compute_advantages,
    overlong_penalty,
    stop_properly_penalty,
)
from quartet.config import PpoConfig
from quartet.config.derive import longest_answer
from quartet.errors import FatalError
from quartet.trainer.experience import Experience

Doubles = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapingSettings:
    """What happens between a reward and an advantage; the flags of the same names say more."""

    advantage: AdvantageSettings
    """Its KL weight is replaced in each step by the controller's."""
    kl_estimator: KlEstimator
    kl_bounds: KlBounds
    """What is bounded in the penalty; the log shows the estimates themselves."""
    kl_in_reward: bool
    """KL is taken from the reward; False where it is a term of the loss, or absent."""
    max_new_tokens: int
    overlong_buffer_len: float | None = None
    overlong_penalty_factor: float = 1.0
    stop_properly_penalty_coef: float | None = None
    stop_properly_legacy: bool = False

    @classmethod
    def of(cls, config: PpoConfig) -> ShapingSettings:
        """The settings that the flags ask for.

        Raises:
            ValueError: naming a value that has no meaning.
        """
        advantage, kl, reward = config.algo.advantage, config.algo.kl, config.reward
        return cls(
            advantage=AdvantageSettings(
                estimator=advantage.estimator,
                gamma=advantage.gamma,
                lam=advantage.lambd,
                no_std_norm=advantage.no_std_norm,
                clip_range=reward.clip_range,
                clip_after_baseline=reward.clip_after_baseline,
                std_eps=advantage.std_eps,
                spans=advantage.observation_spans,
            ),
            kl_estimator=kl.estimator,
            kl_bounds="all" if kl.bound_all else "k3",
            kl_in_reward=kl.init_coef > 0 and not kl.use_loss,
            max_new_tokens=longest_answer(config),
            overlong_buffer_len=reward.overlong_buffer_len,
            overlong_penalty_factor=reward.overlong_penalty_factor,
            stop_properly_penalty_coef=reward.stop_properly_penalty_coef,
            stop_properly_legacy=reward.stop_properly_legacy,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lesson:
    """An experience with what the learners are to make of it. B samples, N tokens."""

    experience: Experience
    advantages: NDArray[np.float32]  # [N]
    returns: NDArray[np.float32]  # [N]
    rewards: Doubles  # [B]
    """After penalties, before baseline and clip: the metric `reward`."""
    sequence_returns: Doubles  # [B]
    group_reward_std: Doubles  # [B]
    kl: Doubles | None  # [N]
    """Estimate of KL(policy || reference) of each token; None without a reference model."""


def shape(experience: Experience, settings: ShapingSettings, *, kl_coef: float) -> Lesson:
    """Apply penalties and KL, and compute advantages and returns.

    Raises:
        FatalError: numbers do not fit each other or are not finite; the algorithms say which.
    """
    mask = experience.action_mask
    rewards = _penalised(experience, settings)
    kl = penalty = None
    if experience.ref_logprobs is not None:
        old, ref = experience.old_logprobs, experience.ref_logprobs
        estimator, bounds = settings.kl_estimator, settings.kl_bounds
        kl = np.where(mask, approx_kl(old, ref, estimator, bounds="none"), 0.0)
        if settings.kl_in_reward:
            penalty = np.where(mask, approx_kl(old, ref, estimator, bounds=bounds), 0.0)
    try:
        result = compute_advantages(
            AdvantageInputs(
                lengths=experience.lengths,
                action_mask=mask,
                rewards=rewards,
                groups=experience.groups,
                kl=penalty,
                values=experience.values,
            ),
            replace(settings.advantage, kl_coef=kl_coef if settings.kl_in_reward else 0.0),
        )
    except ValueError as error:
        raise FatalError(str(error), reason="ADVANTAGES_FAILED") from error
    return Lesson(
        experience=experience,
        advantages=result.advantages,
        returns=result.returns,
        rewards=rewards,
        sequence_returns=result.sequence_returns,
        group_reward_std=result.group_reward_std,
        kl=kl,
    )


def _penalised(experience: Experience, settings: ShapingSettings) -> Doubles:
    """[B] rewards after the penalties on length and on being cut."""
    rewards = np.array([r.reward for r in experience.rewards], np.float64)
    if settings.overlong_buffer_len is not None:
        rewards = overlong_penalty(
            rewards,
            experience.response_lengths,
            max_new_tokens=settings.max_new_tokens,
            buffer_length=settings.overlong_buffer_len,
            factor=settings.overlong_penalty_factor,
        )
    if settings.stop_properly_penalty_coef is not None:
        rewards = stop_properly_penalty(
            rewards,
            experience.truncated,
            coef=settings.stop_properly_penalty_coef,
            legacy=settings.stop_properly_legacy,
        )
    return rewards

"""What is done to a reward before it becomes an advantage."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quartet.algorithms.ragged import Bool, Float, last_action


def clip_rewards(rewards: Float, clip_range: tuple[float, float] | None) -> Float:
    """[B] rewards within (low, high); None leaves them alone."""
    return rewards if clip_range is None else np.clip(rewards, *clip_range)


def overlong_penalty(
    rewards: NDArray[np.floating],
    response_lengths: NDArray[np.integer],
    *,
    max_new_tokens: int,
    buffer_length: float,
    factor: float = 1.0,
) -> Float:
    """Soft penalty for answers that come close to the limit (DAPO, arXiv:2503.14476).

    over = min(length - (max_new_tokens - buffer_length), buffer_length);
    r := r - factor * over / buffer_length where over > 0.

    Args:
        rewards: [B].
        response_lengths: [B] tokens from the first action to the last.
        max_new_tokens: Most tokens of an answer.
        buffer_length: Tokens before the limit over which the penalty grows from 0 to `factor`.
        factor: Largest penalty.

    Raises:
        ValueError: the buffer is not within (0, max_new_tokens], or the factor is negative.
    """
    if not 0 < buffer_length <= max_new_tokens:
        raise ValueError(
            f"the overlong buffer is {buffer_length}; it must be between 1 and {max_new_tokens}, "
            "the most new tokens"
        )
    if not factor >= 0:
        raise ValueError(f"the overlong penalty factor is {factor}; it must not be negative")
    over = np.minimum(response_lengths - (max_new_tokens - buffer_length), buffer_length)
    return np.asarray(rewards, np.float64) - factor * np.maximum(over, 0.0) / buffer_length


def stop_properly_penalty(
    rewards: NDArray[np.floating], truncated: Bool, *, coef: float, legacy: bool = False
) -> Float:
    """Penalty for answers that were cut instead of ending themselves.

    coef in [0, 1]: r := min(r, coef * r). coef < 0: r := min(r, coef). The penalty never raises a
    reward, so a wrong answer gains nothing by rambling on until it is cut.

    Args:
        rewards: [B].
        truncated: [B] True where the answer was cut.
        coef: At most 1.
        legacy: The incumbent's rule: r := coef * r, or r := coef. It raises negative rewards.

    Raises:
        ValueError: coef is above 1 or not a number.
    """
    if not coef <= 1.0:
        raise ValueError(f"the stop-properly coefficient is {coef}; it must be at most 1")
    rewards = np.asarray(rewards, np.float64)
    penalised = coef * rewards if coef >= 0 else np.full_like(rewards, coef)
    if not legacy:
        penalised = np.minimum(rewards, penalised)
    return np.where(truncated, penalised, rewards)


def token_rewards(
    rewards: Float,
    kl: NDArray[np.floating] | None,
    mask: Bool,
    lengths: NDArray[np.integer],
    *,
    kl_coef: float = 0.0,
) -> Float:
    """Put each sample's reward on its last action token, and -kl_coef * kl on every action token.

    Args:
        rewards: [B] shaped rewards.
        kl: [N] KL penalty of each token, or None.
        mask: [N] action tokens.
        lengths: [B] tokens of each sample.
        kl_coef: Weight of the penalty; 0 or less means none.

    Returns:
        [N], 0 where mask is 0. A sample without action tokens receives nothing.
    """
    result = np.zeros(len(mask))
    if kl is not None and kl_coef > 0.0:
        result[mask] = -kl_coef * kl[mask]
    last = last_action(mask, lengths)
    has_action = last >= 0
    result[last[has_action]] += rewards[has_action]
    return result

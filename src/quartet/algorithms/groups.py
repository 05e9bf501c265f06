"""What a sample's reward is compared with: baselines over a group, or over the whole batch.

All statistics are float64 and skip samples without a usable reward. Where all rewards of a group
are equal the result is exactly 0: no rounding of a mean may turn "nothing to learn" into a push.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quartet.algorithms.ragged import Bool, Float, Int, sums_by


@dataclass(frozen=True, slots=True, eq=False)
class GroupStats:
    """Statistics of each sample's group, spread over its members: all arrays are [B]."""

    count: Float
    """Usable members."""
    total: Float
    """Sum of their rewards."""
    mean: Float
    """Mean of their rewards; 0 for a group without any."""
    std: Float
    """Standard deviation with Bessel's correction (n - 1); 0 for fewer than 2 members."""
    equal: Bool
    """True where all usable rewards of the group are the same number, or there is only one."""


def group_stats(rewards: Float, groups: NDArray[np.integer], usable: Bool) -> GroupStats:
    """Statistics by group, over usable members only.

    Args:
        rewards: [B] rewards; those of unusable samples are ignored and may be NaN.
        groups: [B] any integers; equal numbers are one group, in any order.
        usable: [B] which samples count.
    """
    index = _group_index(groups)
    size = int(index.max(initial=-1)) + 1
    clean = np.where(usable, rewards, 0.0)
    count = sums_by(index, usable, size)
    total = sums_by(index, clean, size)
    mean = total / np.maximum(count, 1.0)
    deviation = np.where(usable, rewards - mean[index], 0.0)
    squares = sums_by(index, deviation**2, size)
    low, high = np.full(size, np.inf), np.full(size, -np.inf)
    np.minimum.at(low, index[usable], rewards[usable])
    np.maximum.at(high, index[usable], rewards[usable])
    equal = ~(high > low)
    std = np.where(equal, 0.0, np.sqrt(squares / np.maximum(count - 1.0, 1.0)))
    return GroupStats(count[index], total[index], mean[index], std[index], equal[index])


def _group_index(groups: NDArray[np.integer]) -> Int:
    """[B] groups renumbered from 0."""
    return np.unique(groups, return_inverse=True)[1].astype(np.int64).reshape(-1)


def no_baseline(rewards: Float, groups: Int, usable: Bool, std_eps: float) -> Float:
    """Take the reward r as it is (GAE, REINFORCE++)."""
    return np.where(usable, rewards, 0.0)


def group_mean(rewards: Float, groups: Int, usable: Bool, std_eps: float) -> Float:
    """Compute r - mean(group): REINFORCE++-baseline, and Dr. GRPO (arXiv:2503.20783)."""
    stats = group_stats(rewards, groups, usable)
    return np.where(usable & ~stats.equal, rewards - stats.mean, 0.0)


def leave_one_out(rewards: Float, groups: Int, usable: Bool, std_eps: float) -> Float:
    """Compute r - mean(the others of the group): RLOO (arXiv:2402.14740)."""
    stats = group_stats(rewards, groups, usable)
    others = (stats.total - rewards) / np.maximum(stats.count - 1.0, 1.0)
    return np.where(usable & ~stats.equal, rewards - others, 0.0)


def group_norm(rewards: Float, groups: Int, usable: Bool, std_eps: float) -> Float:
    """Compute (r - mean(group)) / (std(group) + std_eps), GRPO (arXiv:2402.03300)."""
    stats = group_stats(rewards, groups, usable)
    told_apart = usable & ~stats.equal
    scale = np.where(told_apart, stats.std + std_eps, 1.0)
    return np.where(told_apart, (rewards - stats.mean) / scale, 0.0)


def batch_mean(rewards: Float, groups: Int, usable: Bool, std_eps: float) -> Float:
    """Compute r - mean(all samples of the rollout): FlashREINFORCE."""
    return group_mean(rewards, np.zeros_like(groups), usable, std_eps)

"""Correction of the mismatch between the engine that sampled and the learner.

With l = old_logprob - rollout_logprob the importance weight of a token is w = exp(l). A statistic
is compared with a band [low, high]; outside it the token (or its whole sequence) gets weight 0,
or its weight is clipped to the band:

    token + clip: truncated importance sampling; token + mask: IcePop;
    sequence + mask: the weight of the tokens stays, sequences outside the band are left out.

The statistic of a sequence is over the mean of its tokens (geometric mean, for the ratio), not over
their sum.
"""

from __future__ import annotations

import torch

from quartet.types import MismatchCorrection
from quartet_learner.losses.base import (
    MAX_LOG_RATIO,
    StepCounts,
    Tensor,
    TokenBatch,
    mean_by_sequence,
    needed,
)

MIN_PROBABILITY = 1e-6


def correction_weights(
    spec: MismatchCorrection, batch: TokenBatch, counts: StepCounts
) -> tuple[Tensor, Tensor]:
    """Weights of the tokens, and what this batch adds to the share of units outside the band.

    Returns:
        [M] weights without gradient, and a scalar: tokens (level token) or sequences (level seq)
        outside the band, divided by those of the whole step.
    """
    old = needed(batch.old_logprobs, "old_logprobs")
    rollout = needed(batch.rollout_logprobs, "rollout_logprobs")
    log_ratio = old - rollout
    weight = _bounded_exp(log_ratio)
    low, high = spec.threshold_low, spec.threshold_high
    if spec.level == "token":
        statistic = weight if spec.gating == "ratio" else _divergence(spec, old, rollout)
        inside = (statistic >= low) & (statistic <= high)
        outside_share = (~inside).sum() / counts.tokens
    else:
        of_tokens = log_ratio if spec.gating == "ratio" else _divergence(spec, old, rollout)
        statistic = mean_by_sequence(of_tokens, batch)
        statistic = _bounded_exp(statistic) if spec.gating == "ratio" else statistic
        inside_sequences = (statistic >= low) & (statistic <= high)
        has_tokens = batch.lengths() > 0
        outside_share = (~inside_sequences & has_tokens).sum() / counts.sequences
        inside = inside_sequences[batch.segments]
    if spec.mode == "clip":
        return weight.clamp(low, high), outside_share
    return torch.where(inside, weight, 0.0), outside_share


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _divergence(spec: MismatchCorrection, old: Tensor, rollout: Tensor) -> Tensor:
    """[M] distance between the two engines' probabilities of the sampled token.

    binary_kl: KL between two Bernoulli distributions, p of the rollout and q of the learner;
    tv: |p - q|.
    """
    p = rollout.exp().clamp(MIN_PROBABILITY, 1 - MIN_PROBABILITY)
    q = old.exp().clamp(MIN_PROBABILITY, 1 - MIN_PROBABILITY)
    if spec.gating == "tv":
        return (p - q).abs()
    kl = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    # Rounding takes it below 0 where p and q are nearly equal, and so below a band from 0.
    return kl.clamp(min=0.0)

"""Policy gradient losses: PPO, GSPO, CISPO."""

from __future__ import annotations

import torch

from quartet.types import PolicyLoss
from quartet_learner.losses.aggregation import token_weights
from quartet_learner.losses.base import (
    MAX_LOG_RATIO,
    LossOutput,
    StepCounts,
    Tensor,
    TokenBatch,
    mean_by_sequence,
    needed,
    token_mean,
)
from quartet_learner.losses.correction import correction_weights
from quartet_learner.losses.kl import kl_estimate, kl_with_unbiased_gradient


def policy_loss(
    spec: PolicyLoss,
    batch: TokenBatch,
    logprobs: Tensor,
    entropy: Tensor | None,
    counts: StepCounts,
) -> LossOutput:
    """Policy loss with its optional KL, entropy and mismatch terms.

    All terms of the loss use `spec.aggregation`. Metrics are means over tokens, but for
    policy_loss, which is the term as it enters the loss; kl is not bounded as it is in the loss.

    Args:
        spec: form and constants.
        batch: trained tokens with advantages and old_logprobs, and ref or rollout log-probabilities
            where a term needs them.
        logprobs: [M] of the present policy, with gradient.
        entropy: [M], when spec.entropy_coef is set.
        counts: sizes of the step.
    """
    old = needed(batch.old_logprobs, "old_logprobs")
    weights = token_weights(batch, counts, spec.aggregation, spec.aggregation_length)
    ratio = _ratio(spec, batch, logprobs)
    losses, clipped = _token_losses(spec, batch, logprobs, ratio)
    metrics: dict[str, Tensor] = {}
    if batch.rollout_logprobs is not None:
        metrics["vllm_kl"] = token_mean(batch.rollout_logprobs - old, counts)
    if spec.mismatch_correction is not None and spec.type != "gspo":
        coefficients, outside = correction_weights(spec.mismatch_correction, batch, counts)
        losses = coefficients * losses
        metrics["is_filter_ratio"] = outside
    loss = (weights * losses).sum()
    metrics["policy_loss"] = loss.detach()
    metrics["ppo_ratio"] = token_mean(ratio, counts)
    metrics["ppo_clip_ratio"] = token_mean(clipped, counts)
    metrics["ppo_kl"] = token_mean(old - logprobs, counts)
    if batch.ref_logprobs is not None:
        metrics["logprobs_diff"] = token_mean(logprobs - batch.ref_logprobs, counts)
    if spec.kl_loss is not None:
        kl = (weights * _kl_term(spec, batch, logprobs)).sum()
        loss = loss + spec.kl_loss.coef * kl
        metrics["kl"] = token_mean(_kl_as_logged(spec, batch, logprobs), counts)
    if spec.entropy_coef is not None:
        entropy = needed(entropy, "entropy")
        metrics["entropy_loss"] = token_mean(entropy, counts)
        if spec.entropy_coef != 0:
            loss = loss - spec.entropy_coef * (weights * entropy).sum()
    return LossOutput(loss=loss, metrics=metrics)


def _token_losses(
    spec: PolicyLoss, batch: TokenBatch, logprobs: Tensor, ratio: Tensor
) -> tuple[Tensor, Tensor]:
    """[M] losses, and [M] bool: the tokens whose gradient the clip changed."""
    advantages = needed(batch.advantages, "advantages")
    low, high = 1.0 - spec.eps_clip_low, 1.0 + spec.eps_clip_high
    kept = ratio.clamp(low, high)
    if spec.type == "cispo":
        # The gradient flows through the log-probability alone, so no token is silenced.
        return -kept.detach() * advantages * logprobs, kept != ratio
    plain, bounded = ratio * advantages, kept * advantages
    surrogate = torch.minimum(plain, bounded)
    if spec.dual_clip is not None:
        floor = torch.maximum(surrogate, spec.dual_clip * advantages)
        surrogate = torch.where(advantages < 0, floor, surrogate)
    return -surrogate, bounded < plain


def _ratio(spec: PolicyLoss, batch: TokenBatch, logprobs: Tensor) -> Tensor:
    """[M] probability ratios of the present policy to the one that sampled.

    GSPO takes the geometric mean over the sequence; with a mismatch correction it starts from the
    rollout engine's own log-probabilities, which is its whole correction.
    """
    old = needed(batch.old_logprobs, "old_logprobs")
    if spec.type != "gspo":
        return (logprobs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if spec.mismatch_correction is not None:
        old = needed(batch.rollout_logprobs, "rollout_logprobs")
    log_ratio = mean_by_sequence(logprobs - old, batch)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()[batch.segments]


def _kl_as_logged(spec: PolicyLoss, batch: TokenBatch, logprobs: Tensor) -> Tensor:
    """[M] estimates without the bound: a metric must show a divergence."""
    ref = needed(batch.ref_logprobs, "ref_logprobs")
    estimator = spec.kl_loss.estimator if spec.kl_loss is not None else "k1"
    return kl_estimate(logprobs.detach(), ref, estimator, bounds="none")


def _kl_term(spec: PolicyLoss, batch: TokenBatch, logprobs: Tensor) -> Tensor:
    """[M] estimates of KL(policy || ref), with the gradient that the spec asks for."""
    term = spec.kl_loss
    if term is None:
        raise ValueError("the loss has no KL term")
    ref = needed(batch.ref_logprobs, "ref_logprobs")
    kl = kl_estimate(logprobs, ref, term.estimator, bounds="all" if term.bound_all else "k3")
    if not term.unbiased_gradient:
        return kl
    old = needed(batch.old_logprobs, "old_logprobs")
    return kl_with_unbiased_gradient(kl, logprobs, old, ref)

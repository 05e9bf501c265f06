"""Supervised fine-tuning."""

from __future__ import annotations

from quartet_learner.losses.base import LossOutput, StepCounts, Tensor


def sft_loss(logprobs: Tensor, counts: StepCounts) -> LossOutput:
    """Negative log-likelihood, mean over the trained tokens of the step.

    Args:
        logprobs: [M] of the trained tokens, with gradient.
        counts: sizes of the step.
    """
    loss = -logprobs.sum() / counts.tokens
    return LossOutput(loss=loss, metrics={"gpt_loss": loss.detach()})

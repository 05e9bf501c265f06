"""Loss of a critic."""

from __future__ import annotations

import torch

from quartet.types import ValueLoss
from quartet_learner.losses.aggregation import token_weights
from quartet_learner.losses.base import (
    LossOutput,
    StepCounts,
    Tensor,
    TokenBatch,
    needed,
    token_mean,
)


def value_loss(
    spec: ValueLoss, batch: TokenBatch, values: Tensor, counts: StepCounts
) -> LossOutput:
    """0.5 * max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2), without the max for c = None.

    Args:
        spec: clip and aggregation.
        batch: trained tokens with returns, and old_values when there is a clip.
        values: [M] of the present critic, with gradient.
        counts: sizes of the step.
    """
    returns = needed(batch.returns, "returns")
    losses = (values - returns).square()
    if spec.value_clip is not None:
        old = needed(batch.old_values, "old_values")
        near_old = old + (values - old).clamp(-spec.value_clip, spec.value_clip)
        losses = torch.maximum(losses, (near_old - returns).square())
    loss = (token_weights(batch, counts, spec.aggregation) * losses).sum() / 2
    metrics = {"critic_loss": loss.detach(), "values": token_mean(values, counts)}
    return LossOutput(loss=loss, metrics=metrics)

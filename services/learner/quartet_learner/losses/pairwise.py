"""Loss of a reward model, from pairs of a chosen and a rejected answer."""

from __future__ import annotations

from torch.nn.functional import logsigmoid, softplus

from quartet.types import PairwiseLoss
from quartet_learner.losses.base import LossOutput, StepCounts, Tensor


def pairwise_loss(
    spec: PairwiseLoss, rewards: Tensor, margins: Tensor | None, counts: StepCounts
) -> LossOutput:
    """Mean over the pairs of the step.

    sigmoid: -log sigmoid(chosen - rejected - margin) (arXiv:2203.02155, margin arXiv:2307.09288);
    logexp: log(1 + exp(rejected - chosen)), written as softplus, which does not overflow.

    Args:
        spec: form.
        rewards: [2 * pairs], chosen and rejected in turn, with gradient.
        margins: [pairs] or None.
        counts: sizes of the step.
    """
    rewards = rewards.float() if spec.compute_in_fp32 else rewards
    chosen, rejected = rewards[0::2], rewards[1::2]
    difference = chosen - rejected
    if spec.type == "logexp":
        losses = softplus(-difference)
    else:
        losses = -logsigmoid(difference if margins is None else difference - margins)
    loss = losses.float().sum() / counts.pairs
    return LossOutput(loss=loss, metrics=pair_metrics(loss, chosen, rejected, counts))


def pair_metrics(
    loss: Tensor, chosen: Tensor, rejected: Tensor, counts: StepCounts
) -> dict[str, Tensor]:
    """Loss, share of pairs in the right order, and mean rewards of both sides."""
    chosen, rejected = chosen.detach().float(), rejected.detach().float()
    return {
        "loss": loss.detach(),
        "acc": (chosen > rejected).sum() / counts.pairs,
        "chosen_reward": chosen.sum() / counts.pairs,
        "reject_reward": rejected.sum() / counts.pairs,
    }

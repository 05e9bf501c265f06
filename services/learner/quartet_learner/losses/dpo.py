"""Direct preference optimisation and its relatives."""

from __future__ import annotations

from torch.nn.functional import logsigmoid

from quartet.types import DpoLoss
from quartet_learner.losses.base import (
    LossOutput,
    StepCounts,
    Tensor,
    TokenBatch,
    mean_by_sequence,
    needed,
    sum_by_sequence,
)
from quartet_learner.losses.pairwise import pair_metrics


def dpo_loss(spec: DpoLoss, batch: TokenBatch, logprobs: Tensor, counts: StepCounts) -> LossOutput:
    """Mean over the pairs of the step, of summed log-probabilities of the trained tokens.

    With x = (policy - ref) of the chosen answer minus that of the rejected one:
    DPO -log sigmoid(beta x) (arXiv:2305.18290); cDPO mixes in -log sigmoid(-beta x) with weight
    label_smoothing; IPO (x - 1 / (2 beta))^2 (arXiv:2310.12036), of means over the tokens unless
    ipo_sum says otherwise: the target 1 / (2 beta) has no length. nll_loss_coef adds the chosen
    answer's mean negative log-likelihood.

    Args:
        spec: form and constants.
        batch: trained tokens with ref_logprobs; sequences are chosen and rejected in turn.
        logprobs: [M] of the present policy, with gradient.
        counts: sizes of the step.
    """
    ref = needed(batch.ref_logprobs, "ref_logprobs")
    # Differences first: a sum over a long answer has few digits left for them.
    sums = sum_by_sequence(logprobs - ref, batch)
    gaps = sums / batch.lengths().clamp(min=1) if spec.ipo and not spec.ipo_sum else sums
    x = gaps[0::2] - gaps[1::2]
    if spec.ipo:
        losses = (x - 1 / (2 * spec.beta)).square()
    else:
        smoothing = spec.label_smoothing
        losses = -logsigmoid(spec.beta * x) * (1 - smoothing)
        losses = losses - logsigmoid(-spec.beta * x) * smoothing
    preference = losses.sum() / counts.pairs
    rewards = spec.beta * sums
    metrics = pair_metrics(preference, rewards[0::2], rewards[1::2], counts)
    loss = preference
    if spec.nll_loss_coef != 0:
        nll = -mean_by_sequence(logprobs, batch)[0::2].sum() / counts.pairs
        loss = loss + spec.nll_loss_coef * nll
        metrics |= {"nll_loss": nll.detach(), "loss": loss.detach()}
    return LossOutput(loss=loss, metrics=metrics)

"""From losses of tokens to one number.

An aggregation is a weight for each token: the loss is sum(weight * loss). The four of them:

    token-mean               1 / T
    seq-mean-token-mean      1 / (n_s * S)      (n_s: tokens of the token's own sequence)
    seq-mean-token-sum       1 / S
    seq-mean-token-sum-norm  1 / (S * length)   (Dr. GRPO, arXiv:2503.20783)

T and S count the tokens, and the sequences that have any, of the whole optimizer step.
"""

from __future__ import annotations

import torch

from quartet.types.learner import Aggregation
from quartet_learner.losses.base import StepCounts, Tensor, TokenBatch


def token_weights(
    batch: TokenBatch, counts: StepCounts, aggregation: Aggregation, length: int = 0
) -> Tensor:
    """[M] fp32 weights of the batch's tokens.

    Args:
        batch: the tokens of a micro-batch.
        counts: sizes of the whole step.
        aggregation: one of the four above.
        length: the constant length of seq-mean-token-sum-norm, above 0.
    """
    ones = torch.ones(len(batch.segments), device=batch.segments.device)
    if aggregation == "token-mean":
        return ones / counts.tokens
    if aggregation == "seq-mean-token-mean":
        return ones / (batch.lengths()[batch.segments] * counts.sequences)
    if aggregation == "seq-mean-token-sum":
        return ones / counts.sequences
    return ones / (counts.sequences * length)

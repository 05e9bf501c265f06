"""What all losses share: the batch they see, the counts they divide by, what they return.

A loss sees only tokens that are trained. They are picked by index before the loss is computed, so
whatever stands on the other tokens, NaN included, cannot reach the result or its gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

Tensor = torch.Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are kept within +-20 before exp, so that one token cannot become inf."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCounts:
    """Sizes of the whole optimizer step, over all ranks and micro-batches.

    Every loss divides by these and never by the sizes of its own micro-batch. So the sum over
    micro-batches and ranks is the loss of the step, however it was cut.
    """

    tokens: int
    """Trained tokens."""
    sequences: int
    """Sequences with at least one trained token."""
    pairs: int = 0
    """Pairs, for the losses that compare two sequences."""
    all_tokens: int = 0
    """Tokens of all sequences, trained or not: a router sends every one of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBatch:
    """The M trained tokens of a micro-batch, in order, with what is known of each.

    All tensors are [M] fp32, `segments` [M] int64. M may be 0.
    """

    segments: Tensor
    """Which of the micro-batch's sequences each token belongs to, 0 .. num_sequences - 1."""
    num_sequences: int
    advantages: Tensor | None = None
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    rollout_logprobs: Tensor | None = None
    returns: Tensor | None = None
    old_values: Tensor | None = None

    def lengths(self) -> Tensor:
        """[num_sequences] trained tokens of each sequence."""
        return torch.bincount(self.segments, minlength=self.num_sequences)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutput:
    """The part that one micro-batch adds to the step."""

    loss: Tensor
    """Scalar with gradient. Summed over micro-batches and ranks it is the loss of the step."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Scalars without gradient that add up in the same way to the means of the step."""


def needed(value: Tensor | None, name: str) -> Tensor:
    """Give back `value`, which the checks of the request have promised to be there."""
    if value is None:
        raise ValueError(f"the loss needs {name}")
    return value


def sum_by_sequence(values: Tensor, batch: TokenBatch) -> Tensor:
    """[num_sequences] sum of `values` over each sequence; differentiable."""
    return values.new_zeros(batch.num_sequences).index_add(0, batch.segments, values)


def mean_by_sequence(values: Tensor, batch: TokenBatch) -> Tensor:
    """[num_sequences] mean of `values` over each sequence, 0 for one without tokens."""
    return sum_by_sequence(values, batch) / batch.lengths().clamp(min=1)


def token_mean(values: Tensor, counts: StepCounts) -> Tensor:
    """What these tokens add to the mean over all tokens of the step, without gradient."""
    return values.detach().float().sum() / counts.tokens

"""From samples in numpy to one forward pass, and from its outputs to a loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quartet.nn import ModelInputs, model_inputs
from quartet.types import (
    DpoLoss,
    Loss,
    PairwiseLoss,
    PolicyLoss,
    SftLoss,
    TrainSamples,
    ValueLoss,
)
from quartet_learner.checks import comes_in_pairs, used_fields
from quartet_learner.losses import (
    LossOutput,
    StepCounts,
    TokenBatch,
    dpo_loss,
    pairwise_loss,
    policy_loss,
    sft_loss,
    value_loss,
)

NUMBERS = (
    "advantages",
    "old_logprobs",
    "ref_logprobs",
    "rollout_logprobs",
    "returns",
    "old_values",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """One forward pass of a step."""

    inputs: ModelInputs
    rows: Tensor
    """[M] int64: where the hidden states of the outputs are, in the flattened layout."""
    targets: Tensor
    """[M] int64: the tokens they predict (head lm)."""
    tokens: TokenBatch
    margins: Tensor | None
    owners: Tensor | None
    """[N] int64: the sequence of each token, where the loss has a part of the router's."""
    weights: Tensor | None
    """[B] fp32 tokens of each sequence, beside `owners`; 0 in an empty micro-batch."""


def step_counts(samples: TrainSamples, loss: Loss) -> StepCounts:
    """Sizes of the whole step, from all of its samples."""
    sequences = samples.sequences
    pairs = len(sequences) // 2 if comes_in_pairs(loss) else 0
    whole = sequences.num_tokens
    if isinstance(loss, PairwiseLoss) or samples.action_mask is None:
        return StepCounts(tokens=whole, sequences=len(sequences), pairs=pairs, all_tokens=whole)
    trained = np.add.reduceat(samples.action_mask.astype(np.int64), sequences.offsets[:-1])
    return StepCounts(
        tokens=int(trained.sum()),
        sequences=int((trained > 0).sum()),
        pairs=pairs,
        all_tokens=whole,
    )


def make_micro_batch(
    samples: TrainSamples, loss: Loss, *, packed: bool, device: torch.device, empty: bool = False
) -> MicroBatch:
    """Lay samples out and pick the places whose outputs the loss needs.

    Args:
        samples: of this micro-batch.
        loss: decides which places: the hidden state before each trained token, or the last one of
            each sequence for a pairwise loss.
        packed: layout.
        device: where the tensors go.
        empty: keep no outputs at all; the pass adds nothing.
    """
    sequences = samples.sequences
    if isinstance(loss, PairwiseLoss):
        trained = np.zeros(0, np.int64)
        places = np.zeros(0, np.int64) if empty else sequences.offsets[1:] - 1
    else:
        trained = np.flatnonzero(np.asarray(samples.action_mask))
        places = trained - 1
    inputs = model_inputs(sequences, packed=packed, device=device)

    def on_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    fields = used_fields(loss, samples)
    numbers = {
        name: on_device(getattr(samples, name)[trained].astype(np.float32))
        for name in NUMBERS
        if name in fields
    }
    owners = np.repeat(np.arange(len(sequences), dtype=np.int64), sequences.lengths)
    routed = loss.aux_loss_coef != 0
    weights = sequences.lengths.astype(np.float32) * (not empty)
    return MicroBatch(
        inputs=inputs,
        rows=inputs.places[on_device(places)],
        targets=on_device(sequences.token_ids[trained].astype(np.int64)),
        tokens=TokenBatch(
            segments=on_device(owners[trained]), num_sequences=len(sequences), **numbers
        ),
        margins=None if samples.margins is None else on_device(samples.margins.astype(np.float32)),
        owners=on_device(owners) if routed else None,
        weights=on_device(weights) if routed else None,
    )


def run_micro_batch(model: Any, batch: MicroBatch, loss: Loss, counts: StepCounts) -> LossOutput:
    """Forward pass through `model` (a TrainedModel, or DeepSpeed's engine around one) and loss."""
    temperature, with_entropy = 1.0, False
    if isinstance(loss, PolicyLoss):
        temperature, with_entropy = loss.temperature, loss.entropy_coef is not None
    outputs, entropy, balance = model(
        batch.inputs,
        batch.rows,
        targets=batch.targets,
        temperature=temperature,
        with_entropy=with_entropy,
        owners=batch.owners,
    )
    if isinstance(loss, PairwiseLoss):
        out = pairwise_loss(loss, outputs, batch.margins, counts)
    elif isinstance(loss, ValueLoss):
        out = value_loss(loss, batch.tokens, outputs.float(), counts)
    else:
        out = _lm_loss(loss, batch.tokens, outputs, entropy, counts)
    if balance is None or batch.weights is None:
        return out
    return _with_balance(out, loss, (balance * batch.weights).sum() / counts.all_tokens)


def _with_balance(out: LossOutput, loss: Loss, balance: Tensor) -> LossOutput:
    """Add this micro-batch's part of the router's loss; the metric is without coefficient."""
    return LossOutput(
        loss=out.loss + loss.aux_loss_coef * balance,
        metrics={**out.metrics, "aux_loss": balance.detach()},
    )


def _lm_loss(
    loss: Loss, tokens: TokenBatch, logprobs: Tensor, entropy: Tensor | None, counts: StepCounts
) -> LossOutput:
    if isinstance(loss, PolicyLoss):
        return policy_loss(loss, tokens, logprobs, entropy, counts)
    if isinstance(loss, DpoLoss):
        return dpo_loss(loss, tokens, logprobs, counts)
    if isinstance(loss, SftLoss):
        return sft_loss(logprobs, counts)
    raise TypeError(f"no head lm trains with {type(loss).__name__}")

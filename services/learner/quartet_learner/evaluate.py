"""Forward passes without training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quartet.nn import model_inputs
from quartet.nn.logprobs import predicted_tokens
from quartet.types import ForwardOutput, SequenceBatch, TrainSamples
from quartet_learner.batching import MicroBatch
from quartet_learner.group import RankGroup
from quartet_learner.samples import take, token_places

Outputs = NDArray[np.float32]


def evaluate(
    model: Any,
    group: RankGroup,
    sequences: SequenceBatch,
    share: Sequence[MicroBatch],
    output: ForwardOutput,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    packed: bool = False,
) -> Outputs:
    """Outputs of the head over all sequences, the same on every rank. Collective.

    Args:
        model: DeepSpeed's engine around a TrainedModel, in eval mode.
        group: all ranks.
        sequences: of all ranks together.
        share: micro-batches of this rank; all ranks have the same number.
        output: what to compute; must fit the head.
        temperature: divisor of the logits.
        with_entropy: compute entropies as well.
        packed: layout of a micro-batch.

    Returns:
        [1, size] fp32, or [2, size] with entropies in the second row; size is N, or B for rewards.
    """
    per_sequence = output is ForwardOutput.REWARDS
    size = len(sequences) if per_sequence else sequences.num_tokens
    found = torch.zeros(2 if with_entropy else 1, size, dtype=torch.float32)
    everything = TrainSamples(sequences=sequences)
    with torch.no_grad():
        for rows in share:
            part = take(everything, rows or [0]).sequences
            if not rows:
                part = replace(part, token_ids=part.token_ids[:1], lengths=np.ones(1, np.int32))
            places, outputs = _one_pass(
                model, part, output, temperature, with_entropy, packed, group.device
            )
            if rows and group.leads:
                of_all = np.asarray(rows) if per_sequence else token_places(sequences, rows)
                found[:, torch.from_numpy(of_all[places])] = outputs
    if group.world_size > 1:
        # Each number was computed by one rank and is 0 on the others.
        torch.distributed.all_reduce(found, group=group.control)
    return found.numpy()


def normalized(
    values: Outputs, sequences: SequenceBatch, output: ForwardOutput, mean: float, std: float
) -> Outputs:
    """(x - mean) / std; what stands for a sequence's first token, which has no value, stays 0."""
    scaled = ((values - mean) / std).astype(np.float32)
    if output is ForwardOutput.VALUES:
        scaled[..., sequences.offsets[:-1]] = 0.0
    return scaled


def _one_pass(
    model: Any,
    sequences: SequenceBatch,
    output: ForwardOutput,
    temperature: float,
    with_entropy: bool,
    packed: bool,
    device: torch.device,
) -> tuple[NDArray[np.int64], torch.Tensor]:
    """Places (of sequences, or of tokens) among those given, and their outputs on the CPU."""
    inputs = model_inputs(sequences, packed=packed, device=device)
    if output is ForwardOutput.REWARDS:
        places = np.arange(len(sequences), dtype=np.int64)
        last = torch.from_numpy(sequences.offsets[1:] - 1).to(device)
        rewards, *_ = model(inputs, inputs.places[last])
        return places, rewards.float().cpu()[None]
    places = predicted_tokens(sequences)
    rows = inputs.places[torch.from_numpy(places - 1).to(device)]
    if output is ForwardOutput.VALUES:
        values, *_ = model(inputs, rows)
        return places, values.float().cpu()[None]
    targets = torch.from_numpy(sequences.token_ids[places].astype(np.int64)).to(device)
    logprobs, entropy, _ = model(
        inputs, rows, targets=targets, temperature=temperature, with_entropy=with_entropy
    )
    both = [logprobs] if entropy is None else [logprobs, entropy]
    return places, torch.stack(both).cpu()

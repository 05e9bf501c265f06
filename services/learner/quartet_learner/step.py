"""One optimizer step on one rank: gradients over its micro-batches, then the update."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence
from typing import Any

import torch

from quartet.types import Loss, TrainSamples
from quartet_learner.batching import MicroBatch
from quartet_learner.group import RankGroup
from quartet_learner.losses import StepCounts
from quartet_learner.microbatch import make_micro_batch, run_micro_batch
from quartet_learner.samples import nothing_like, take

log = logging.getLogger(__name__)

MAX_OVERFLOWS = 24
"""fp16: times that one step is tried, each time with the loss scale that DeepSpeed then has."""


def take_step(
    deepspeed: Any,
    group: RankGroup,
    samples: TrainSamples,
    loss: Loss,
    share: Sequence[MicroBatch],
    counts: StepCounts,
    *,
    packed: bool,
) -> tuple[dict[str, float], float, bool]:
    """Train on all samples of the step once. Collective.

    Args:
        deepspeed: the engine, with its training model inside.
        group: all ranks.
        samples: of the whole step.
        loss: what is minimised.
        share: micro-batches of this rank; all ranks have the same number.
        counts: sizes of the whole step.
        packed: layout of a micro-batch.

    Returns:
        Metrics of the whole step, the gradient's norm before clipping, and whether the weights
        changed. They do not when the gradient is not finite.
    """
    for attempt in itertools.count(1):
        sums = _accumulate(deepspeed, group, samples, loss, share, counts, packed)
        metrics = group.sum(sums if group.leads else dict.fromkeys(sums, 0.0))
        norm, applied = _apply(deepspeed)
        # A gradient that overflows in fp16 although the loss is finite only needs another scale.
        scale_too_high = deepspeed.fp16_enabled() and all(map(math.isfinite, metrics.values()))
        if applied or not scale_too_high or attempt == MAX_OVERFLOWS:
            return metrics, norm, applied
        log.info("fp16: the gradient overflowed, attempt %d", attempt)
    raise AssertionError("unreachable: the loop ends by returning")


def _accumulate(
    deepspeed: Any,
    group: RankGroup,
    samples: TrainSamples,
    loss: Loss,
    share: Sequence[MicroBatch],
    counts: StepCounts,
    packed: bool,
) -> dict[str, float]:
    """Forward and backward over this rank's micro-batches; what they add to the metrics."""
    deepspeed.train()
    sums: dict[str, torch.Tensor] = {}
    for number, rows in enumerate(share, start=1):
        batch = make_micro_batch(
            take(samples, rows) if rows else nothing_like(samples),
            loss,
            packed=packed,
            device=group.device,
            empty=not rows,
        )
        deepspeed.set_gradient_accumulation_boundary(number == len(share))
        out = run_micro_batch(deepspeed, batch, loss, counts)
        # DeepSpeed averages gradients over ranks, but the losses of the ranks add up. Ranks of a
        # ring have the same loss, and each the gradient of its own part of the sequences.
        deepspeed.backward(out.loss * group.layout.gradient_size, scale_wrt_gas=False)
        for name, value in out.metrics.items():
            sums[name] = sums.get(name, torch.zeros((), dtype=torch.float64)) + value.double().cpu()
    return {name: value.item() for name, value in sums.items()}


def _apply(deepspeed: Any) -> tuple[float, bool]:
    """Clip and update; the gradient's norm before clipping, and whether there was an update."""
    if deepspeed.zero_optimization():
        deepspeed.step()
        applied = bool(deepspeed.was_step_applied())
        norm = deepspeed.get_global_grad_norm()
        return (math.inf if norm is None else float(norm)), applied
    # Stage 0 reports no norm and would step with NaN. Here every rank holds the whole gradient.
    gradients = [p.grad for p in deepspeed.module.parameters() if p.grad is not None]
    norm = float(torch.nn.utils.get_total_norm(gradients))
    if not math.isfinite(norm):
        deepspeed.zero_grad()
        return norm, False
    deepspeed.step()
    return norm, True

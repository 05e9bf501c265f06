"""Steps and samples that the engine's tests train on."""

from __future__ import annotations

from typing import Any

import numpy as np

from quartet.types import Loss, PolicyLoss, SequenceBatch, TrainSamples, TrainStep
from quartet.types.requests import ForwardRequest

LENGTHS = (5, 9, 3, 12, 7, 7, 2, 10)


def make_sequences(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> SequenceBatch:
    rng = np.random.default_rng(seed)
    rows = [rng.integers(3, 300, n).tolist() for n in lengths]
    return SequenceBatch.of(rows, [f"s{i}" for i in range(len(rows))])


def make_samples(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> TrainSamples:
    """Everything any loss needs, off-policy enough that ratios, clips and KL are all at work."""
    rng = np.random.default_rng(seed + 100)
    sequences = make_sequences(seed, lengths)
    n = sequences.num_tokens
    mask = rng.random(n) < 0.7
    mask[sequences.offsets[1:] - 1] = True
    mask[sequences.offsets[:-1]] = False

    def numbers(mean: float, std: float) -> np.ndarray:
        return rng.normal(mean, std, n).astype(np.float32)

    old = numbers(-6.0, 0.2)
    return TrainSamples(
        sequences=sequences,
        action_mask=mask,
        advantages=numbers(0, 1),
        old_logprobs=old,
        ref_logprobs=old + numbers(0, 0.1),
        rollout_logprobs=old + numbers(0, 0.1),
        returns=numbers(0, 1),
        old_values=numbers(0, 1),
        margins=np.abs(numbers(0, 1))[: len(lengths) // 2],
    )


def step_of(loss: Loss | None = None, number: int = 0, **limits: Any) -> TrainStep:
    limits = limits or {"max_tokens_per_micro_batch": 4096}
    return TrainStep(
        request_id=f"step{number}",
        run_id="run",
        loss=loss or PolicyLoss(),
        expected_optimizer_steps=number,
        **limits,
    )


def logprobs_of(engine: Any, sequences: SequenceBatch, **options: Any) -> np.ndarray:
    request = ForwardRequest(chunk_id="c", sequences=sequences, **options)
    return engine.forward(request).output

"""Optimizer steps: a learner is told one step at a time, and each is recorded before it is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quartet.errors import ConfigError, FatalError, RequestError, StateError
from quartet.trainer.ledger import Ledger
from quartet.trainer.rooms import Trainee
from quartet.trainer.seeds import generator
from quartet.trainer.shaping import Lesson
from quartet.types import Loss, RunSpec, SequenceBatch, TrainResult, TrainSamples, TrainStep

MAX_SKIPPED_IN_A_ROW = 3
"""Optimizer steps that may be refused one after the other for a gradient that is not finite."""

Rows = NDArray[np.int64]
Cut = Callable[[Rows], TrainSamples]
"""Makes the samples of an optimizer step from their row numbers."""


@dataclass(slots=True)
class WeightedMeans:
    """Means of metrics over optimizer steps, weighted by what each was a mean of."""

    sums: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)

    def add(self, metrics: Mapping[str, float], weight: float) -> None:
        """Add the metrics of one step; a metric that a step lacks does not count for it."""
        for name, value in metrics.items():
            self.sums[name] = self.sums.get(name, 0.0) + weight * value
            self.weights[name] = self.weights.get(name, 0.0) + weight

    def add_step(self, result: TrainResult) -> None:
        """Add what a step says of itself, unless it was refused: then it is not finite."""
        if result.applied:
            self.add(result.metrics, result.num_action_tokens or result.num_samples)

    def means(self) -> dict[str, float]:
        """The means so far."""
        return {
            name: total / self.weights[name]
            for name, total in self.sums.items()
            if self.weights[name] > 0
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSettings:
    """How a learner goes over its samples."""

    role: str
    """learner or critic."""
    request_prefix: str
    """Begins every request id: unique to this trainer process, so that a service that outlives it
    never takes the step of another trainer for a repeat."""
    seed: int
    batch_size: int
    max_epochs: int = 1
    micro_batch_size: int | None = None
    max_tokens_per_micro_batch: int | None = None


@dataclass(kw_only=True, slots=True)
class TrainingReport:
    """What a learner made of some optimizer steps."""

    means: WeightedMeans = field(default_factory=WeightedMeans)
    """The learner's own metrics."""
    first: Mapping[str, float] = field(default_factory=dict)
    """Those of the first optimizer step taken, before any update on these samples."""
    lr: float = 0.0
    """Of the last step."""
    grad_norm: float = 0.0
    """Of the last step, before clipping."""
    num_steps: int = 0
    num_skipped: int = 0
    """Steps that were refused because their gradient was not finite."""
    num_tokens: int = 0
    """Tokens that went through the learner."""
    num_micro_batches: int = 0

    def add(self, result: TrainResult) -> None:
        """Take in one step."""
        if result.applied:
            self.first = self.first or dict(result.metrics)
        self.means.add_step(result)
        self.lr, self.grad_norm = result.lr, result.grad_norm
        self.num_steps += 1
        self.num_skipped += not result.applied
        self.num_tokens += result.num_tokens
        self.num_micro_batches += result.num_micro_batches


class Training:
    """One learner's optimizer steps. `start` once, then `step` or `go_over` again and again."""

    def __init__(self, settings: TrainingSettings, trainee: Trainee, *, ledger: Ledger) -> None:
        """Train by `trainee`."""
        self.settings = settings
        self.trainee = trainee
        self._ledger = ledger
        self._skipped_in_a_row = 0
        self.steps_sent = 0
        """Optimizer steps sent, applied or not."""
        self.steps_taken = 0
        """Optimizer steps behind the run, as the learner counts them."""

        self._run_id = ""

    async def start(self, spec: RunSpec) -> None:
        """Build optimizer and schedule.

        Raises:
            ConfigError: the learner cannot do what the flags ask for with its model.
            FatalError: the learner has steps of this run behind it that nobody knows of.
        """
        try:
            started = await self.trainee.start_run(spec)
        except StateError:
            raise
        except RequestError as error:
            # Nothing in a run's spec but comes from a flag.
            raise ConfigError(error.message, info=error.info) from error
        if started.optimizer_steps:
            raise FatalError(
                f"the {self.settings.role} has {started.optimizer_steps} optimizer steps of the "
                f"new run {spec.run_id} behind it",
                reason="RUN_ALREADY_BEGUN",
            )
        self._run_id = spec.run_id

    def go_on(self, *, run_id: str, optimizer_steps: int) -> None:
        """Take over where a loaded checkpoint stands."""
        self._run_id = run_id
        self.steps_taken = optimizer_steps

    async def step(
        self,
        *,
        step: int,
        loss: Loss,
        samples: TrainSamples,
    ) -> TrainResult:
        """Take one optimizer step of trainer step `step`.

        Raises:
            FatalError: several gradients in a row were not finite.
        """
        request_id = f"{self.settings.request_prefix}/{self.settings.role}/{self.steps_sent}"
        await self._ledger.begin_optimizer_step(
            request_id=request_id,
            step=step,
            role=self.settings.role,
            number=self.steps_sent,
            sample_ids=samples.sequences.sample_ids,
        )
        result = await self.trainee.train(
            TrainStep(
                request_id=request_id,
                run_id=self._run_id,
                loss=loss,
                expected_optimizer_steps=self.steps_taken,
                max_tokens_per_micro_batch=self.settings.max_tokens_per_micro_batch,
                micro_batch_size=self.settings.micro_batch_size,
            ),
            [samples],
        )
        await self._ledger.end_optimizer_step(request_id, applied=result.applied)
        self.steps_sent += 1
        self.steps_taken = result.optimizer_steps
        self._skipped_in_a_row = 0 if result.applied else self._skipped_in_a_row + 1
        if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise FatalError(
                f"the {self.settings.role} refused {self._skipped_in_a_row} optimizer steps in a "
                "row because their gradients were not finite",
                reason="GRADIENTS_NOT_FINITE",
                remedy="lower the learning rate, or look at the samples of this step in the ledger",
            )
        return result

    async def go_over(
        self, *, step: int, loss: Loss, num_samples: int, cut: Cut, advance: Callable[[int], None]
    ) -> TrainingReport:
        """Go over a rollout's samples `max_epochs` times, in a new seeded order each time.

        The last optimizer step of a pass may be smaller than `batch_size`.
        """
        report = TrainingReport()
        size = self.settings.batch_size
        for epoch in range(self.settings.max_epochs):
            order = generator(self.settings.seed, "train", step, epoch).permutation(num_samples)
            for start in range(0, num_samples, size):
                rows = order[start : start + size]
                report.add(await self.step(step=step, loss=loss, samples=cut(rows)))
                advance(len(rows))
        return report


def policy_samples(lesson: Lesson, *, with_ref: bool, with_rollout: bool) -> Cut:
    """What the policy trains on.

    Args:
        lesson: the rollout.
        with_ref: send the reference's log-probabilities, for KL in the loss.
        with_rollout: send the rollout engine's, for the mismatch correction.
    """
    experience = lesson.experience
    tensors: dict[str, NDArray[Any]] = {
        "action_mask": experience.action_mask,
        "advantages": lesson.advantages,
        "old_logprobs": experience.old_logprobs,
    }
    if with_ref and experience.ref_logprobs is not None:
        tensors["ref_logprobs"] = experience.ref_logprobs
    if with_rollout:
        tensors["rollout_logprobs"] = experience.rollout_logprobs
    spec = experience.logprob_spec if with_rollout else None
    return lambda rows: TrainSamples(
        sequences=take_sequences(experience.sequences, rows),
        rollout_logprob_spec=spec,
        **take_tokens(experience.sequences, tensors, rows),
    )


def critic_samples(lesson: Lesson) -> Cut:
    """What the critic trains on."""
    experience = lesson.experience
    if experience.values is None:
        raise FatalError("a critic is trained without its old values", reason="NO_VALUES")
    tensors = {
        "action_mask": experience.action_mask,
        "returns": lesson.returns,
        "old_values": experience.values,
    }
    return lambda rows: TrainSamples(
        sequences=take_sequences(experience.sequences, rows),
        **take_tokens(experience.sequences, tensors, rows),
    )


def take_sequences(sequences: SequenceBatch, rows: Rows) -> SequenceBatch:
    """Some sequences of a batch, in the order of `rows`."""
    return SequenceBatch(
        token_ids=sequences.token_ids[_tokens_of(sequences, rows)],
        lengths=sequences.lengths[rows],
        sample_ids=tuple(sequences.sample_ids[r] for r in rows.tolist()),
    )


def take_tokens(
    sequences: SequenceBatch, tensors: Mapping[str, NDArray[Any]], rows: Rows
) -> dict[str, Any]:
    """The same sequences' part of flat [N] arrays."""
    index = _tokens_of(sequences, rows)
    return {name: flat[index] for name, flat in tensors.items()}


def _tokens_of(sequences: SequenceBatch, rows: Rows) -> Rows:
    """Positions in the flat arrays of the sequences `rows`."""
    offsets = sequences.offsets.tolist()
    return np.concatenate([np.arange(offsets[r], offsets[r + 1]) for r in rows.tolist()])

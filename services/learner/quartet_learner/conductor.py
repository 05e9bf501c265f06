"""Rank 0's side of a learner, on the one thread that may touch torch.

It checks what a caller sent, tells the other ranks, and runs the same command itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from quartet.errors import DataError, FatalError, QuartetError, StateError
from quartet.types import (
    ForwardResult,
    RunSpec,
    SequenceBatch,
    TrainResult,
    TrainSamples,
    TrainStep,
    WeightManifest,
)
from quartet.types.requests import (
    ExportModelRequest,
    ForwardRequest,
    LoadCheckpointRequest,
    LoadCheckpointResult,
    SaveCheckpointRequest,
    SavedFolder,
    StartRunRequest,
    StartRunResult,
)
from quartet.weights import PushClock
from quartet_learner import checkpoint, checks, samples, sleep
from quartet_learner.batching import Limits, plan_micro_batches
from quartet_learner.commands import COMMANDS, encode_arguments
from quartet_learner.engine import DEFAULT_MAX_TOKENS, OUTPUT_OF_HEAD, LearnerEngine, Run
from quartet_learner.optim import effective_zero_stage
from quartet_learner.ranks import STOP, CommandChannel, end_process

log = logging.getLogger(__name__)


class Conductor:
    """Runs commands on all ranks. Blocking; all methods from the same thread."""

    def __init__(self, engine: LearnerEngine, channel: CommandChannel) -> None:
        """Conduct `engine`, which is rank 0, and whoever listens on `channel`."""
        self.engine = engine
        self._channel = channel
        self._broken = ""

    def start_run(self, request: StartRunRequest) -> StartRunResult:
        """Begin a run, or go on with the one of that name."""
        self._check_run(request.spec)
        return self._on_all_ranks("start_run", request.spec)

    def train(self, step: TrainStep, parts: Sequence[TrainSamples]) -> TrainResult:
        """One optimizer step.

        Raises:
            RequestError: samples or loss are wrong, by name.
            StateError: the learner stands at another step, or in another run.
        """
        run = self._run_of(step.run_id)
        if step.expected_optimizer_steps != run.optimizer_steps:
            raise StateError(
                f"the learner has taken {run.optimizer_steps} steps, not "
                f"{step.expected_optimizer_steps}",
                reason="WRONG_STEP",
                field="expected_optimizer_steps",
                value=str(step.expected_optimizer_steps),
                remedy="read optimizer_steps with GetInfo, and load the checkpoint that fits",
            )
        engine = self.engine
        checks.check_loss(step.loss, engine.settings.head, routed=run.spec.with_router_loss)
        checks.check_samples(step.loss, parts)
        joined = samples.join(parts)
        checks.check_joined(step.loss, joined, engine.model.vocabulary, engine.max_length)
        limits = engine.limits(step.max_tokens_per_micro_batch, step.micro_batch_size)
        self._check_plan(joined, limits, pairs=checks.comes_in_pairs(step.loss))
        return self._on_all_ranks("train", step, _unnamed(joined))

    def forward(self, requests: Sequence[ForwardRequest]) -> list[ForwardResult]:
        """Evaluate chunks that differ in nothing but their sequences, as one batch."""
        self.engine.started()
        first = requests[0]
        checks.check_forward(first, OUTPUT_OF_HEAD[self.engine.settings.head])
        everything = samples.join([TrainSamples(sequences=r.sequences) for r in requests])
        checks.check_sequences(
            everything.sequences, self.engine.model.vocabulary, self.engine.max_length
        )
        limits = self.engine.limits(first.max_tokens_per_micro_batch or DEFAULT_MAX_TOKENS)
        self._check_plan(everything, limits)
        together = replace(first, sequences=_unnamed(everything).sequences)
        result = self._on_all_ranks("forward", together)
        _check_outputs(result, everything.sequences)
        return _split(result, requests)

    def save_checkpoint(self, request: SaveCheckpointRequest) -> SavedFolder:
        """Write a checkpoint."""
        self.engine.started()
        return self._on_all_ranks("save_checkpoint", request)

    def load_checkpoint(self, request: LoadCheckpointRequest) -> LoadCheckpointResult:
        """Go on from a checkpoint; verified before any rank touches it."""
        tag = checkpoint.resolve(Path(request.folder), request.tag)
        stored = checkpoint.describe(Path(request.folder), tag)
        checkpoint.check_fits(stored, self.engine.model, self.engine.group)
        self._check_run(stored.spec)
        return self._on_all_ranks("load_checkpoint", replace(request, tag=tag))

    def export_model(self, request: ExportModelRequest) -> SavedFolder:
        """Write a folder that from_pretrained opens."""
        self.engine.started()
        return self._on_all_ranks("export_model", request)

    def buckets(
        self, manifest: WeightManifest, clock: PushClock | None = None
    ) -> Iterator[tuple[int, Any]]:
        """Yield the flat buffers of a push; to be iterated to the end, whatever happens."""
        self.engine.started()
        self._channel.send("gather", lambda: encode_arguments("gather", (manifest,)))
        yield from self.engine.buckets(manifest, clock)

    def sleep(self) -> None:
        """Free the device."""
        stage = effective_zero_stage(self.engine.settings)
        sleep.check_can_sleep(stage)
        self._on_all_ranks("sleep")

    def wake(self) -> None:
        """Take it back."""
        self._on_all_ranks("wake")

    def stop(self) -> None:
        """Let the other ranks end."""
        self._channel.send(STOP)

    def _check_run(self, spec: RunSpec) -> None:
        settings = self.engine.settings
        checks.check_run(
            spec,
            self.engine.model.experts_taken,
            zero_stage=effective_zero_stage(settings),
            reentrant=settings.gradient_checkpointing and settings.gradient_checkpointing_reentrant,
            adapters=settings.lora_rank > 0,
        )

    def _run_of(self, run_id: str) -> Run:
        run = self.engine.started()
        if run.spec.run_id != run_id:
            raise StateError(
                f"another run, {run.spec.run_id}, began on this learner at {_clock(run.began)}",
                reason="WRONG_RUN",
                field="run_id",
                value=run_id,
                remedy="give each run a learner of its own; this one can be resumed from a "
                "checkpoint with --ckpt.load_enable",
            )
        return run

    def _check_plan(self, joined: TrainSamples, limits: Limits, *, pairs: bool = False) -> None:
        """Refuse here what cannot be cut, not on all ranks."""
        plan_micro_batches(
            joined.sequences.lengths.tolist(),
            limits,
            world_size=self.engine.group.layout.data_size,
            sequences_per_unit=2 if pairs else 1,
            names=samples.names_of(joined.sequences),
        )

    def _on_all_ranks(self, name: str, *arguments: Any) -> Any:
        """Run a command everywhere; the result of rank 0.

        A failure that is not a QuartetError may have left other ranks in a collective and the
        engine half-way: several ranks end as one, a single one answers nothing any more.
        """
        if self._broken:
            raise FatalError(
                f"the learner broke before: {self._broken}",
                reason="LEARNER_BROKEN",
                remedy="restart it and load the last checkpoint",
            )
        self._channel.send(name, lambda: encode_arguments(name, arguments))
        try:
            return COMMANDS[name].run(self.engine, *arguments)
        except QuartetError:
            raise
        except Exception as error:
            sentence = f"{name} failed: {type(error).__name__}: {error}"
            log.exception("%s", sentence)
            if self.engine.group.world_size > 1:
                end_process(f"{sentence}: the learner stops", 1)
            self._broken = sentence
            raise FatalError(sentence, reason="LEARNER_BROKEN") from error


def _unnamed(joined: TrainSamples) -> TrainSamples:
    """Without sample names: checked samples need none, and two chunks may share one."""
    return replace(joined, sequences=replace(joined.sequences, sample_ids=()))


def _check_outputs(result: ForwardResult, sequences: SequenceBatch) -> None:
    """Raise for outputs that are not finite: one sample's fault, or the model's if all are."""
    bad = np.flatnonzero(~np.isfinite(result.output))
    if not len(bad):
        return
    rows = bad
    if len(result.output) == sequences.num_tokens:
        rows = np.unique(np.searchsorted(sequences.offsets, bad, side="right") - 1)
    if len(rows) == len(sequences) > 1:
        raise FatalError(
            "the model gives no finite number for any sequence",
            reason="MODEL_NOT_FINITE",
            remedy="load the last checkpoint, and lower the learning rate",
        )
    raise DataError(
        "the model gives no finite number for this sequence",
        reason="OUTPUT_NOT_FINITE",
        sample_id=samples.names_of(sequences)[int(rows[0])],
        remedy="drop the sample",
    )


def _split(result: ForwardResult, requests: Sequence[ForwardRequest]) -> list[ForwardResult]:
    """Cut the outputs of a joined batch back into chunks."""
    per_sequence = len(result.output) == sum(len(r.sequences) for r in requests)
    parts: list[ForwardResult] = []
    start = 0
    for request in requests:
        tokens = request.sequences.num_tokens
        end = start + (len(request.sequences) if per_sequence else tokens)
        parts.append(
            ForwardResult(
                chunk_id=request.chunk_id,
                output=result.output[start:end],
                entropy=None if result.entropy is None else result.entropy[start:end],
            )
        )
        start = end
    return parts


def _clock(seconds: float) -> str:
    """Date and time of this machine."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))

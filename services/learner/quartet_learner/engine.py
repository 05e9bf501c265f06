"""One rank of a learner: the model in a DeepSpeed engine. Public methods are collective.

The same calls with the same arguments happen on every rank, in the same order (see ranks.py).
Whatever a caller can get wrong has been checked before (see checks.py).
"""

from __future__ import annotations

import gc
import logging
import os
import random
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quartet.errors import ConfigError, FatalError, QuartetError, StateError
from quartet.types import (
    ForwardOutput,
    ForwardResult,
    Head,
    RunSpec,
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
    StartRunResult,
)
from quartet.weights import PushClock
from quartet_learner import checkpoint, deepcompile, sleep, tensor_parallel, weights
from quartet_learner.batching import Limits, plan_micro_batches
from quartet_learner.checks import comes_in_pairs
from quartet_learner.ema import MovingAverage
from quartet_learner.evaluate import evaluate, normalized
from quartet_learner.group import RankGroup, import_deepspeed
from quartet_learner.lora import reset_adapters
from quartet_learner.microbatch import step_counts
from quartet_learner.model import init_head
from quartet_learner.optim import (
    build_optimizer,
    build_schedule,
    deepspeed_config,
    offloads,
)
from quartet_learner.prepare import load_prepared
from quartet_learner.samples import names_of
from quartet_learner.settings import LearnerSettings
from quartet_learner.step import take_step

log = logging.getLogger(__name__)

DEFAULT_MAX_TOKENS = 8192
"""Tokens of one forward pass on one rank when a Forward does not say."""

OUTPUT_OF_HEAD = {
    Head.LM: ForwardOutput.LOGPROBS,
    Head.VALUE: ForwardOutput.VALUES,
    Head.REWARD: ForwardOutput.REWARDS,
}


@dataclass(slots=True)
class Run:
    """The run under way on this rank."""

    spec: RunSpec
    deepspeed: Any
    """deepspeed.DeepSpeedEngine around the model."""
    average: MovingAverage | None = None
    """Of the weights, when the run asks for one."""
    optimizer_steps: int = 0
    asleep: bool = False
    began: float = field(default_factory=time.time)
    """When it began on this learner, in seconds since 1970."""


class LearnerEngine:
    """The model, and DeepSpeed around it once a run has started.

    Attributes:
        settings: as given.
        group: this rank among the others.
        model: what is trained. ZeRO-3 partitions its parameters.
        run: the run under way, or None.
        num_parameters: trainable parameters.
    """

    def __init__(self, settings: LearnerSettings, group: RankGroup) -> None:
        """Load the model. Raises ConfigError when it cannot be loaded."""
        self.settings = settings
        self.group = group
        self.run: Run | None = None
        quiet_libraries()
        check_dtype(settings)
        if settings.adam_offload and not offloads(settings) and group.rank == 0:
            log.warning(
                "ds.adam_offload changes nothing here: without a GPU the optimizer is in main "
                "memory as it is"
            )
        set_determinism(settings.seed, settings.full_determinism)
        self.model, self._head_is_new = load_prepared(settings, group)
        self.num_parameters = self.model.num_parameters()
        if group.rank == 0:
            log.info("%s", self.model.trained_share())
        self._last_begun = ""
        """Half a sentence for whoever misses a run."""

    @property
    def max_length(self) -> int:
        """Longest sequence in tokens; 0 where there is no limit."""
        known = [n for n in (self.settings.max_length, self.model.max_length) if n > 0]
        return min(known, default=0)

    def limits(self, max_tokens: int | None, max_units: int | None = None) -> Limits:
        """Bounds of a micro-batch; the ranks of a ring take `max_tokens` each."""
        if max_tokens is not None:
            max_tokens *= self.group.layout.ring_size
        return Limits(max_tokens=max_tokens, max_units=max_units, padded=not self.settings.packed)

    def start_run(self, spec: RunSpec) -> StartRunResult:
        """Build optimizer, schedule and engine; a run that is under way already goes on."""
        if self.run is not None and self.run.spec.run_id == spec.run_id:
            return StartRunResult(
                optimizer_steps=self.run.optimizer_steps,
                resumed=True,
                num_parameters=self.num_parameters,
            )
        self._last_begun = f"; run {spec.run_id} was the last to be begun, at {time.ctime()}"
        self.forget_run()
        set_determinism(spec.seed, spec.full_determinism)
        if self._head_is_new:
            init_head(self.model, spec.seed)
        reset_adapters(self.model.hf, spec.seed)
        optimizer = build_optimizer(self.model, spec.optimizer, self.settings)
        engine, *_ = import_deepspeed().initialize(
            model=self.model,
            optimizer=optimizer,
            lr_scheduler=build_schedule(optimizer, spec.schedule),
            config=deepspeed_config(self.settings, spec)
            | tensor_parallel.deepspeed_section(self.model.hf, self.settings)
            | deepcompile.deepspeed_section(self.settings),
            dist_init_required=False,
        )
        tensor_parallel.trust_the_data(engine)
        if self.group.layout.gradient_size == 1 and not engine.zero_optimization():
            # There is nobody to sum with; DeepSpeed would copy all gradients twice to find out.
            engine.enable_backward_allreduce = False
        deepcompile.compile_engine(engine, self.settings)
        average = None
        if spec.ema_beta is not None:
            average = MovingAverage(self.model.hf, self.group, spec.ema_beta)
        self.run = Run(spec=spec, deepspeed=engine, average=average)
        return StartRunResult(optimizer_steps=0, num_parameters=self.num_parameters)

    def forget_run(self) -> None:
        """Drop the run, and take the model as it was loaded again."""
        if self.run is None:
            return
        self.run.deepspeed.destroy()
        self.run = None
        del self.model
        gc.collect()
        self.model, self._head_is_new = load_prepared(self.settings, self.group)

    def train(self, step: TrainStep, samples: TrainSamples) -> TrainResult:
        """One optimizer step over `samples`; every rank is given all of them.

        A step whose gradient is not finite leaves weights, optimizer and schedule as they are.
        """
        run = self.started()
        began = time.monotonic()
        limits = self.limits(step.max_tokens_per_micro_batch, step.micro_batch_size)
        plan = plan_micro_batches(
            samples.sequences.lengths.tolist(),
            limits,
            world_size=self.group.layout.data_size,
            sequences_per_unit=2 if comes_in_pairs(step.loss) else 1,
            names=names_of(samples.sequences),
        )
        counts = step_counts(samples, step.loss)
        lr = float(run.deepspeed.get_lr()[0])
        metrics, norm, applied = take_step(
            run.deepspeed,
            self.group,
            samples,
            step.loss,
            plan.ranks[self.group.data_rank],
            counts,
            packed=self.settings.packed,
        )
        run.optimizer_steps += applied
        if applied and run.average is not None:
            run.average.update()
        return TrainResult(
            optimizer_steps=run.optimizer_steps,
            applied=applied,
            metrics=metrics,
            grad_norm=norm,
            lr=lr,
            num_samples=len(samples.sequences),
            num_action_tokens=counts.tokens,
            num_tokens=samples.sequences.num_tokens,
            num_micro_batches=plan.num_micro_batches,
            seconds=time.monotonic() - began,
        )

    def forward(self, request: ForwardRequest) -> ForwardResult:
        """Outputs of the head over the request's sequences, the same on every rank."""
        run = self.started()
        sequences, output = request.sequences, request.output or OUTPUT_OF_HEAD[self.settings.head]
        packed = self.settings.packed
        plan = plan_micro_batches(
            sequences.lengths.tolist(),
            self.limits(request.max_tokens_per_micro_batch or DEFAULT_MAX_TOKENS),
            world_size=self.group.layout.data_size,
            names=names_of(sequences),
        )
        run.deepspeed.eval()
        values = evaluate(
            run.deepspeed,
            self.group,
            sequences,
            plan.ranks[self.group.data_rank],
            output,
            temperature=request.temperature,
            with_entropy=request.with_entropy,
            packed=packed,
        )
        if self.settings.normalize and output is not ForwardOutput.LOGPROBS:
            values = normalized(values, sequences, output, *self.model.normalization())
        entropy = values[1] if request.with_entropy else None
        return ForwardResult(chunk_id=request.chunk_id, output=values[0], entropy=entropy)

    def save_checkpoint(self, request: SaveCheckpointRequest) -> SavedFolder:
        """Write a checkpoint that `load_checkpoint` goes on from, here bit for bit."""
        run = self.started()
        moment = checkpoint.Moment(
            model=self.model,
            deepspeed=run.deepspeed,
            spec=run.spec,
            optimizer_steps=run.optimizer_steps,
            average=run.average,
        )
        folder = Path(request.folder)
        return checkpoint.save(moment, self.group, folder, request.tag, request.trainer_state)

    def load_checkpoint(self, request: LoadCheckpointRequest) -> LoadCheckpointResult:
        """Go on from a checkpoint whose tag `checkpoint.resolve` has found whole.

        When a file cannot be read after all, there is no run afterwards, rather than half of one.
        """
        stored = checkpoint.describe(Path(request.folder), request.tag)
        self.forget_run()
        self.start_run(stored.spec)
        run = self.started()
        try:
            checkpoint.load(self.model, run.deepspeed, self.group, stored, average=run.average)
        except QuartetError:
            self.forget_run()
            self._last_begun = f"; checkpoint {request.tag} could not be loaded"
            raise
        run.optimizer_steps = stored.optimizer_steps
        return LoadCheckpointResult(
            tag=request.tag,
            optimizer_steps=stored.optimizer_steps,
            trainer_state=stored.trainer_state,
            run_id=stored.spec.run_id,
        )

    def export_model(self, request: ExportModelRequest) -> SavedFolder:
        """Write a folder that `from_pretrained` opens: the average where there is one."""
        average = self.started().average
        return weights.export(
            self.model,
            self.group,
            self.settings.model_name_or_path,
            Path(request.folder),
            request.config_values,
            averaged=None if average is None else average.values,
        )

    def buckets(
        self, manifest: WeightManifest, clock: PushClock | None = None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the flat buffers of a push; every rank iterates to the end."""
        self.started()
        return weights.buckets(self.model, manifest, clock)

    def sleep(self) -> None:
        """Move weights and states off the device; a learner that sleeps sleeps on."""
        if self.run is not None and not self.run.asleep:
            sleep.sleep(self.run.deepspeed)
            self.run.asleep = True

    def wake(self) -> None:
        """Move them back; a learner that is awake stays so."""
        if self.run is not None and self.run.asleep:
            sleep.wake(self.run.deepspeed)
            self.run.asleep = False

    def started(self) -> Run:
        """The run, awake; StateError otherwise."""
        if self.run is None:
            raise StateError(
                f"no run is under way{self._last_begun}",
                reason="NO_RUN",
                remedy="call StartRun or LoadCheckpoint",
            )
        if self.run.asleep:
            raise StateError("the learner is asleep", reason="ASLEEP", remedy="call Wake")
        return self.run


def check_dtype(settings: LearnerSettings) -> None:
    """Raise ConfigError for fp16 where the device cannot train in it."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator is None:
        raise FatalError("DeepSpeed finds no device", reason="NO_DEVICE")
    if settings.param_dtype == "float16" and not accelerator.is_fp16_supported():
        raise ConfigError(
            "this machine's device cannot train in fp16",
            field="ds.param_dtype",
            value="fp16",
            remedy="use --ds.param_dtype fp32 on a CPU, or bf16",
        )


def quiet_libraries() -> None:
    """Keep progress bars and warnings about others' deprecated calls out of the service's log."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch|deepspeed")


def set_determinism(seed: int, full: bool) -> None:
    """Seed what draws random numbers, and if `full` allow only kernels that repeat bit for bit."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if full:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(full)

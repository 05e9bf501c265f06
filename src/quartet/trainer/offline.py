"""The loop of the methods that learn from a data set alone: SFT, reward modelling and DPO.

They need one learner, and DPO a reference model. Rows are gone over in a seeded order, the last
batch of a pass is trained although it may be smaller, and every optimizer step is in the ledger.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, TypeVar

from quartet.config import DpoConfig, RmConfig, SftConfig
from quartet.obs.progress import Phase
from quartet.trainer.checkpoints import Checkpoints
from quartet.trainer.metrics import Metrics
from quartet.trainer.rooms import Trainee
from quartet.trainer.run import Job, Run, absolute
from quartet.trainer.schedule import Batch, SeededBatches
from quartet.trainer.services import connect_learner, local_services
from quartet.trainer.settings import begun_with, nothing_left_note, run_spec, warmup_note
from quartet.trainer.training import Training, TrainingSettings, WeightedMeans
from quartet.types import Head, Loss, TrainResult, TrainSamples

OfflineConfig = SftConfig | RmConfig | DpoConfig
Row = TypeVar("Row")

EVAL_TOKENS = 1 << 17
"""Tokens of one Forward call of an evaluation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lessons(Generic[Row]):
    """What a method trains on, and how."""

    head: Head
    rows: Sequence[Row]
    to_samples: Callable[[Sequence[Row]], TrainSamples]
    """Rows as a batch for the learner."""
    loss: Loss
    tokenizer_fingerprint: str
    fetch: Callable[[Sequence[Row]], Awaitable[None]] | None = None
    """Gets what `to_samples` needs from other services, for one batch while another trains."""
    eval_rows: Sequence[Row] = ()
    evaluate: Callable[[Trainee, Sequence[Row]], Awaitable[Metrics]] | None = None
    """Numbers of the model as it is, on `eval_rows`."""
    export_values: Callable[[Metrics], dict[str, float]] = field(default=lambda _: {})
    """What the last evaluation puts into the exported model's config.json."""


def offline_job(config: OfflineConfig, lessons: Lessons[Any]) -> Job:
    """A run on `lessons`."""

    async def body(run: Run) -> None:
        async with AsyncExitStack() as stack:
            trainee = await connect_learner(
                config, run, stack, head=lessons.head, fingerprint=lessons.tokenizer_fingerprint
            )
            await OfflineLoop(config, run, lessons, trainee).run()

    return Job(services=local_services(config), body=body)


class OfflineLoop(Generic[Row]):
    """One run over a data set."""

    def __init__(
        self, config: OfflineConfig, run: Run, lessons: Lessons[Row], trainee: Trainee
    ) -> None:
        """Train `trainee` on `lessons`."""
        train = config.train
        self._config = config
        self._run = run
        self._lessons = lessons
        self._trainee = trainee
        self._batches = SeededBatches(lessons.rows, batch_size=train.batch_size, seed=train.seed)
        self._training = Training(
            TrainingSettings(
                role="learner",
                request_prefix=run.run_id,
                seed=train.seed,
                batch_size=train.batch_size,
                micro_batch_size=train.micro_batch_size,
            ),
            trainee,
            ledger=run.ledger,
        )
        every_epoch = self._batches.per_epoch * train.max_epochs
        self._total = min(train.max_steps or every_epoch, every_epoch)
        self._checkpoints = Checkpoints(
            config.ckpt,
            {"learner": (trainee, "")},
            run_id=run.run_id,
            counted_by={
                "train.seed": train.seed,
                "train.batch_size": train.batch_size,
                "number of rows": len(lessons.rows),
            },
            begun_with=begun_with(config, total_steps=self._total),
            progress=run.progress,
        )
        self._means = WeightedMeans()
        """Over the epoch so far."""
        self._evaluated_at = -1
        self._last_eval: Metrics = {}

    async def run(self) -> None:
        """Do all steps, evaluate, and export."""
        config, lessons = self._config, self._lessons
        self._run.progress.say(
            f"{len(lessons.rows)} rows, {self._batches.per_epoch} steps an epoch, "
            f"{self._total} optimizer steps"
        )
        behind = await self._resume() if config.ckpt.load_enable else 0
        if note := nothing_left_note(behind, self._total, "train.max_epochs"):
            self._run.progress.say(note)
        if not behind:
            spec = run_spec(
                self._run.run_id,
                config,
                total_steps=self._total,
                seed=config.train.seed,
                full_determinism=config.train.full_determinism_enable,
                aux_loss_coef=self._lessons.loss.aux_loss_coef,
            )
            if note := warmup_note(spec):
                self._run.progress.say(note)
            await self._training.start(spec)
        for first, epoch in self._epochs(behind):
            await self._epoch(first, epoch)
        await self._evaluate(self._total)
        await self._export()

    async def _resume(self) -> int:
        """Go on from the latest checkpoint; returns the steps behind it."""
        restored = await self._checkpoints.restore()
        self._training.go_on(
            run_id=restored.run_ids["learner"],
            optimizer_steps=restored.optimizer_steps["learner"],
        )
        step = int(restored.state["cursor"])
        self._means = WeightedMeans(**restored.state["means"])
        await self._run.ledger.rewind(step)
        self._run.sinks.rewind(step)
        return step

    def _epochs(self, behind: int) -> Iterator[tuple[int, list[Batch[Row]]]]:
        """The number of each epoch's first step, and its batches, without the steps behind us."""
        for epoch in range(self._config.train.max_epochs):
            first = epoch * self._batches.per_epoch
            done = max(0, behind - first)
            batches = self._batches.of_epoch(epoch)[: max(0, self._total - first)][done:]
            if batches:
                yield first + done + 1, batches

    async def _epoch(self, first: int, batches: Sequence[Batch[Row]]) -> None:
        """Train on the batches of one epoch, or on what is left of it."""
        if batches[0].index == 0:
            self._means = WeightedMeans()
        total = sum(len(batch.rows) for batch in batches)
        name = f"epoch {batches[0].epoch + 1} train"
        with self._run.progress.phase(name, total=total, unit="samples") as phase:
            async for step, batch in self._fetched(first, batches, phase):
                phase.waiting_for = f"learner, step {step} of {self._total}"
                began = time.monotonic()
                result = await self._training.step(
                    step=step, loss=self._lessons.loss, samples=self._lessons.to_samples(batch.rows)
                )
                self._means.add_step(result)
                phase.advance(len(batch.rows))
                self._log(step, batch.epoch, result, time.monotonic() - began)
                state = {"cursor": step, "means": asdict(self._means)}
                await self._run.ledger.save_state(state)
                if self._is_eval_step(step):
                    await self._evaluate(step)
                await self._checkpoints.after_step(step, state)
        if self._config.eval.steps == -1:
            await self._evaluate(first + len(batches) - 1)

    async def _fetched(
        self, first: int, batches: Sequence[Batch[Row]], phase: Phase
    ) -> AsyncIterator[tuple[int, Batch[Row]]]:
        """Numbered batches as they are ready to train; one is fetched ahead."""
        fetch = self._lessons.fetch
        if fetch is None:
            for numbered in enumerate(batches, start=first):
                yield numbered
            return
        ahead = asyncio.ensure_future(fetch(batches[0].rows))
        try:
            for index, batch in enumerate(batches):
                phase.waiting_for = f"ref, step {first + index} of {self._total}"
                await ahead
                if index + 1 < len(batches):
                    ahead = asyncio.ensure_future(fetch(batches[index + 1].rows))
                yield first + index, batch
        finally:
            ahead.cancel()

    def _is_eval_step(self, step: int) -> bool:
        every = self._config.eval.steps
        return every > 0 and step % every == 0

    def _log(self, step: int, epoch: int, result: TrainResult, seconds: float) -> None:
        metrics: Metrics = dict(result.metrics)
        # The incumbent's running means; here over the epoch so far, weighted as the steps were.
        for name, mean in self._means.means().items():
            if name in ("gpt_loss", "loss"):
                metrics["loss_mean"] = mean
            elif name == "acc":
                metrics["acc_mean"] = mean
        metrics |= {
            "lr": result.lr,
            "grad_norm": result.grad_norm,
            "epoch": float(epoch),
            "num_tokens": float(result.num_tokens),
            "num_samples_trained": float(result.num_samples),
            "skipped_steps": float(not result.applied),
            "timing/step_total": seconds,
            "tokens_per_second": result.num_tokens / max(seconds, 1e-9),
        }
        if step % self._config.logger.logging_steps == 0:
            self._run.sinks.log("train", step, metrics)
        self._run.summary |= {"steps": step, "metrics": dict(sorted(metrics.items()))}

    async def _evaluate(self, step: int) -> None:
        """Evaluate after `step`, unless that was done already."""
        lessons = self._lessons
        if lessons.evaluate is None or not lessons.eval_rows or step == self._evaluated_at:
            return
        name, total = f"step {step} evaluate", len(lessons.eval_rows)
        with self._run.progress.phase(name, total=total, unit="samples") as phase:
            self._last_eval = await lessons.evaluate(self._trainee, lessons.eval_rows)
            phase.advance(total)
        self._evaluated_at = step
        self._run.sinks.log("eval", step, self._last_eval)
        self._run.summary["eval"] = self._last_eval

    async def _export(self) -> None:
        """Write the trained model where `ckpt.output_dir` says."""
        with self._run.progress.phase("export learner"):
            path = await self._trainee.export_model(
                request_id=f"{self._run.run_id}/learner/export",
                folder=absolute(self._config.ckpt.output_dir),
                config_values=self._lessons.export_values(self._last_eval),
            )
        self._run.progress.say(f"the model is in {path}")
        self._run.summary["learner_output_dir"] = path


def in_calls(sizes: Sequence[int], *, max_tokens: int = EVAL_TOKENS) -> Iterator[slice]:
    """Cut rows of the given sizes into consecutive parts of at most `max_tokens` (or one row)."""
    start = total = 0
    for index, size in enumerate(sizes):
        if index > start and total + size > max_tokens:
            yield slice(start, index)
            start, total = index, 0
        total += size
    if start < len(sizes):
        yield slice(start, len(sizes))

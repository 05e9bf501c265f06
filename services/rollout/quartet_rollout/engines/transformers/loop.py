"""The thread that owns the model. Steps the batches; between two steps it does what it is told.

Callers are on an event loop. They hand over closures and get futures: nothing of the model or of a
batch is touched from any other thread.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

import torch

from quartet.errors import InfraError, UnavailableError
from quartet.obs import metrics
from quartet.types import PauseMode
from quartet_rollout.engines.transformers.batch import Batch
from quartet_rollout.engines.transformers.model import CausalLm
from quartet_rollout.engines.transformers.sequence import Sequence as Sample

log = logging.getLogger(__name__)

T = TypeVar("T")


class _Flow(Enum):
    """What the loop does between commands."""

    RUN = "run"
    DRAIN = "drain"
    """Finish what runs, let nothing join."""
    HOLD = "hold"


@dataclass(kw_only=True, slots=True, eq=False)
class Job:
    """The samples of one request."""

    samples: Sequence[Sample]
    isolated: bool
    done: Future[None] = field(default_factory=Future)
    """Set when every sample is done; fails when the loop ends first."""
    started: Future[None] = field(default_factory=Future)
    """Set at the first sampled token."""


class Scheduler:
    """Which batch steps next. Driven by one thread; tests drive it by hand.

    All jobs share one batch, except isolated ones: each of those has a batch of its own, one at a
    time, so that its rounding does not depend on who else is there.
    """

    def __init__(self, model: CausalLm, *, max_rows: int, replica: str = "") -> None:
        self.model = model
        self.policy_version = 0
        self._max_rows = max_rows
        self._replica = replica
        self._flow = _Flow.RUN
        self._shared = Batch(model, max_rows=max_rows, replica=replica)
        self._isolated: tuple[Job, Batch] | None = None
        self._isolated_waiting: deque[Job] = deque()
        self._jobs: list[Job] = []
        self._drained: list[Future[int]] = []

    @property
    def is_idle(self) -> bool:
        """True when a step would do nothing."""
        return self._flow is _Flow.HOLD or self.num_in_flight == 0

    @property
    def num_in_flight(self) -> int:
        """Samples running or waiting."""
        return sum(not s.is_done for job in self._jobs for s in job.samples)

    @property
    def num_waiting(self) -> int:
        """Samples that have no row yet."""
        isolated = sum(len(job.samples) for job in self._isolated_waiting)
        return isolated + sum(batch.num_waiting for batch in self._batches())

    def add(self, job: Job) -> None:
        """Take a job."""
        self._jobs.append(job)
        if job.isolated:
            self._isolated_waiting.append(job)
        else:
            self._shared.add(job.samples)

    def cancel(self, job: Job) -> None:
        """Stop a job's samples; their rows are free at once."""
        for sample in job.samples:
            sample.is_cancelled = True
        self._settle()

    def step(self) -> None:
        """One token of everything that runs."""
        admit = self._flow is _Flow.RUN
        if self._isolated is None and self._isolated_waiting and admit:
            job = self._isolated_waiting.popleft()
            batch = Batch(self.model, max_rows=self._max_rows, replica=self._replica)
            batch.add(job.samples)
            self._isolated = (job, batch)
        count = sum(b.step(self.policy_version, admit=admit) for b in self._batches() if len(b))
        metrics.GENERATED_TOKENS.inc(count)
        self._settle()

    def pause(self, mode: PauseMode) -> Future[int]:
        """Hold, at once (keep, abort) or when all that runs is done (drain)."""
        held: Future[int] = Future()
        if mode is PauseMode.DRAIN:
            self._flow = _Flow.DRAIN
            self._drained.append(held)
        else:
            self._flow = _Flow.HOLD
            if mode is PauseMode.ABORT:
                for batch in self._batches():
                    batch.abort()
            held.set_result(self.num_in_flight)
        self._settle()
        return held

    def resume(self) -> int:
        """Go on; the number of samples that do."""
        self._flow = _Flow.RUN
        for waiting in self._drained:
            waiting.set_result(self.num_in_flight)
        self._drained = []
        return self.num_in_flight

    def forget_cache(self) -> int:
        """Drop all keys and values; returns how many samples were running."""
        return sum(batch.forget_cache() for batch in self._batches())

    def fail_all(self, error: BaseException) -> None:
        """End every job with an error."""
        for job in self._jobs:
            for sample in job.samples:
                sample.is_cancelled = True
            job.done.set_exception(error)
        self._jobs = []
        self._isolated_waiting.clear()
        self._isolated = None
        self._shared = Batch(self.model, max_rows=self._max_rows, replica=self._replica)
        for waiting in self._drained:
            waiting.set_exception(error)
        self._drained = []

    def _batches(self) -> list[Batch]:
        return [self._shared] + ([self._isolated[1]] if self._isolated else [])

    def _settle(self) -> None:
        """Answer finished jobs, and give up what nobody waits for."""
        for batch in self._batches():
            batch.drop_done()
        if self._isolated and not len(self._isolated[1]):
            self._isolated = None
        self._isolated_waiting = deque(
            job for job in self._isolated_waiting if not all(s.is_done for s in job.samples)
        )
        for job in self._jobs:
            if not job.started.done() and any(s.tokens for s in job.samples):
                job.started.set_result(None)
        finished = [job for job in self._jobs if all(s.is_done for s in job.samples)]
        self._jobs = [job for job in self._jobs if job not in finished]
        for job in finished:
            job.done.set_result(None)
        if self._flow is _Flow.DRAIN and not any(b.num_running for b in self._batches()):
            self._flow = _Flow.HOLD
            for waiting in self._drained:
                waiting.set_result(self.num_in_flight)
            self._drained = []
        metrics.QUEUE_DEPTH.labels(queue="rollout").set(self.num_waiting)
        metrics.COMPLETIONS_IN_FLIGHT.set(self.num_in_flight)


class EngineLoop:
    """Runs a Scheduler on a thread of its own."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="quartet-engine", daemon=True)
        self._scheduler: Scheduler | None = None
        self._is_closing = False
        self._thread.start()

    async def start(self, make: Callable[[], Scheduler]) -> Scheduler:
        """Load on the thread that will run the model."""

        def load() -> Scheduler:
            self._scheduler = make()
            return self._scheduler

        return await _awaited(self.submit(load))

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` on the thread, between two steps."""
        future: Future[T] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        self._commands.put(command)
        return future

    async def close(self) -> None:
        """End the thread after the step under way; jobs that are not done fail."""

        def close() -> None:
            self._is_closing = True
            if self._scheduler is not None:
                self._scheduler.fail_all(
                    UnavailableError("the engine is closing", reason="DRAINING")
                )

        await _awaited(self.submit(close))

    def _run(self) -> None:
        with torch.inference_mode():
            while not self._is_closing:
                self._obey()
                if self._scheduler is None or self._is_closing:
                    continue
                try:
                    self._scheduler.step()
                except Exception as error:
                    # Whoever waits must hear of it; the next jobs may still succeed.
                    log.exception("a step of the engine failed")
                    self._scheduler.fail_all(
                        InfraError(
                            f"the engine failed: {type(error).__name__}: {error}",
                            reason="ENGINE_FAILED",
                        )
                    )

    def _obey(self) -> None:
        """Do all that was asked; wait for something while there is nothing to step."""
        while not self._is_closing:
            is_idle = self._scheduler is None or self._scheduler.is_idle
            try:
                command: Any = self._commands.get(block=is_idle)
            except queue.Empty:
                return
            command()


async def _awaited(future: Future[T]) -> T:
    return await asyncio.wrap_future(future)

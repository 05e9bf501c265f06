"""A user's Python file with `reward_func(queries, prompts, labels, **kwargs)`.

The function runs in worker processes of its own, never in the server: a verifier that hangs,
crashes, prints, forks or leaks costs one sample and one worker. See `quartet_reward.worker`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quartet.errors import ConfigError, DataError, InfraError
from quartet.types import Failure, ScoreItem
from quartet.workers import read_source
from quartet_reward.answer import DEFAULT_MAX_ABS, read_answer
from quartet_reward.scorer import Job, Outcome, ScorerTraits
from quartet_reward.worker_process import WorkerProcess

logger = logging.getLogger(__name__)

IMPORT_TIME_LIMIT = 300.0
"""Seconds a reward file may take to import; torch from a cold disk takes tens."""


@dataclass(slots=True)
class _Slot:
    """A place for one worker. Its worker changes when one is killed."""

    worker: WorkerProcess | None = None
    revival: asyncio.Task[None] | None = None


class FunctionScorer:
    """Calls the function in one of `num_workers` processes."""

    def __init__(
        self,
        path: str | Path,
        *,
        num_workers: int = 1,
        batch_size: int = 1,
        time_limit: float = 120.0,
        max_abs: float = DEFAULT_MAX_ABS,
    ) -> None:
        """Say what to run; `start` runs it.

        Args:
            path: the file.
            num_workers: processes.
            batch_size: items a call gets at most. Functions written for the incumbent are called
                with lists of length 1 and may count on it.
            time_limit: seconds a call may take before its process is killed.
            max_abs: see `read_answer`.
        """
        self._path = Path(path).expanduser().resolve()
        self._source = ""
        self._batch_size = batch_size
        self._time_limit = time_limit
        self._max_abs = max_abs
        self._slots = [_Slot() for _ in range(num_workers)]
        self._idle: asyncio.Queue[_Slot] = asyncio.Queue()
        self._is_stopping = False

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers alive now."""
        workers = [slot.worker for slot in self._slots if slot.worker is not None]
        return [worker.pid for worker in workers if worker.is_alive]

    async def start(self) -> ScorerTraits:
        """Check the file, start all workers and let them import it.

        Raises:
            ConfigError: it is missing, does not parse, cannot be imported, or has no reward_func.
        """
        self._source = read_source(self._path, "reward file")
        await asyncio.gather(*(self._fill(slot) for slot in self._slots))
        for slot in self._slots:
            self._idle.put_nowait(slot)
        return ScorerTraits(
            kind="function",
            digest=hashlib.sha256(self._source.encode()).hexdigest(),
            model_name_or_path=str(self._path),
            max_batches=len(self._slots),
            max_batch_items=self._batch_size,
        )

    async def prepare(
        self, items: Sequence[ScoreItem], tokenizer_fingerprint: str
    ) -> list[Job | Failure]:
        """A function reads text: there is nothing to prepare."""
        return [Job(item=item) for item in items]

    async def score(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Call the function once, with all jobs of the batch."""
        slot = await self._idle.get()
        try:
            worker = await self._worker_of(slot)
            answer = await worker.call(
                [job.item.query for job in jobs],
                [job.item.prompt for job in jobs],
                [job.item.label for job in jobs],
                time_limit=self._time_limit,
            )
            return read_answer(answer, len(jobs), max_abs=self._max_abs)
        except DataError as error:
            samples = ", ".join(job.item.sample_id for job in jobs)
            logger.warning("%s [sample %s]%s", error.message, samples, _notes(error))
            raise
        finally:
            self._return(slot)

    async def sleep(self) -> None:
        """Nothing to free: the workers hold no device memory of ours."""

    async def wake(self) -> None:
        """Nothing to take back."""

    async def stop(self) -> None:
        """Kill all workers."""
        self._is_stopping = True
        revivals = [slot.revival for slot in self._slots if slot.revival is not None]
        for revival in revivals:
            revival.cancel()
        await asyncio.gather(*revivals, return_exceptions=True)
        workers = [slot.worker for slot in self._slots if slot.worker is not None]
        await asyncio.gather(*(worker.kill() for worker in workers))

    async def _worker_of(self, slot: _Slot) -> WorkerProcess:
        """The slot's worker, a new one if it has died while it was idle."""
        if slot.worker is not None and slot.worker.is_alive:
            return slot.worker
        try:
            return await self._fill(slot)
        except ConfigError as error:  # the file was fine at start: this is no fault of the caller
            raise InfraError(f"no reward worker: {error.message}", reason="WORKER_START") from error

    async def _fill(self, slot: _Slot) -> WorkerProcess:
        if slot.worker is not None:
            await slot.worker.kill()
        slot.worker = await WorkerProcess.start(
            self._path, self._source, time_limit=IMPORT_TIME_LIMIT
        )
        return slot.worker

    def _return(self, slot: _Slot) -> None:
        """Make the slot idle again, after a new worker has started if the old one is dead."""
        if slot.worker is not None and slot.worker.is_alive:
            self._idle.put_nowait(slot)
        elif not self._is_stopping:
            slot.revival = asyncio.create_task(self._revive(slot))

    async def _revive(self, slot: _Slot) -> None:
        try:
            await self._fill(slot)
        except Exception as error:  # the next call on this slot tries again, and fails with it
            logger.error("cannot start another reward worker: %s", error)
        self._idle.put_nowait(slot)


def _notes(error: BaseException) -> str:
    notes = getattr(error, "__notes__", [])
    return "".join(f"\n{note}" for note in notes)

"""The agent workers of a run: episodes go to whichever has room, and dead ones are replaced."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from quartet.agents.episode import Episode, Play, Script, read_result
from quartet.agents.process import AgentProcess, Answer, WorkerLostError
from quartet.errors import ConfigError, DataError, InfraError
from quartet.workers import read_source

logger = logging.getLogger(__name__)

LOAD_SECONDS = 300.0
"""Seconds an agent's file may take to load; torch from a cold disk takes tens."""

AnswerOf = Callable[[int], Answer]
"""Makes the function that completes prompts for an attempt at an episode, from 0."""

MOST_ATTEMPTS = 3
"""How often an episode is begun whose workers die under it through no fault of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentSettings:
    """What is run, and how much of it at once."""

    path: Path
    model_name_or_path: str
    """Where the workers load the tokenizer."""
    fingerprint: str
    """Of the tokenizer that they must find there."""
    vocab_size: int
    """Token ids are below it, or below what the policy itself samples."""
    use_fast: bool = True
    trust_remote_code: bool = False
    num_workers: int = 1
    episodes_per_worker: int = 32
    time_limit: float = 600.0
    """Seconds that the user's code of an episode may take."""

    @property
    def tokenizer(self) -> dict[str, str | bool]:
        """How a worker loads the tokenizer."""
        return {
            "name": self.model_name_or_path,
            "use_fast": self.use_fast,
            "trust_remote_code": self.trust_remote_code,
            "fingerprint": self.fingerprint,
        }


@dataclass(slots=True, eq=False)
class _Slot:
    """A place for one worker. Its worker changes when one dies."""

    worker: AgentProcess | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class AgentPool:
    """Plays episodes. Use it as an async context manager, which starts and kills the workers."""

    def __init__(self, settings: AgentSettings) -> None:
        """Say what to run.

        Raises:
            ConfigError: the file is missing or does not parse.
        """
        self.settings = settings
        self._source = read_source(settings.path, "agent file")
        self._slots = [_Slot() for _ in range(settings.num_workers)]
        self._seats: asyncio.Queue[_Slot] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        """Start all workers.

        Raises:
            ConfigError: the file is no agent.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for slot in self._slots:
                    tasks.create_task(self._fill(slot))
        except BaseExceptionGroup as group:
            await self._stop()
            raise group.exceptions[0] from None
        except BaseException:
            await self._stop()
            raise
        for _ in range(self.settings.episodes_per_worker):
            for slot in self._slots:
                self._seats.put_nowait(slot)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Kill all workers with everything they started."""
        await self._stop()

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers alive now."""
        workers = [slot.worker for slot in self._slots if slot.worker is not None]
        return [worker.pid for worker in workers if worker.is_alive]

    async def play(self, episode: Episode, script: Script, answer: AnswerOf) -> Play:
        """Have one sample made and checked.

        Args:
            episode: what is to be made.
            script: where `answer` writes down what the policy said; empty.
            answer: makes the function that completes prompts for the given attempt.

        Raises:
            DataError: there will be no such sample; the reason says why.
            InfraError: no worker could be started, or the policy cannot be asked.
        """
        for attempt in range(MOST_ATTEMPTS):
            script.turns.clear()
            slot = await self._seats.get()
            try:
                worker = await self._worker_of(slot)
                result = await worker.play(
                    episode, answer(attempt), time_limit=self.settings.time_limit
                )
            except WorkerLostError as lost:
                logger.info("%s; episode %s is played again", lost.message, episode.sample_id)
                continue
            finally:
                self._seats.put_nowait(slot)
            return read_result(
                result,
                script,
                max_length=episode.max_length,
                vocab_size=self.settings.vocab_size,
            )
        raise DataError(
            f"{MOST_ATTEMPTS} agent workers died under the episode", reason="WORKER_DIED"
        )

    async def _worker_of(self, slot: _Slot) -> AgentProcess:
        """The slot's worker, a new one if it has died."""
        async with slot.lock:
            if slot.worker is not None and slot.worker.is_alive:
                return slot.worker
            try:
                return await self._fill(slot)
            except ConfigError as error:  # the file was fine at the start
                raise InfraError(
                    f"no agent worker: {error.message}", reason="WORKER_START"
                ) from error

    async def _fill(self, slot: _Slot) -> AgentProcess:
        if slot.worker is not None:
            await slot.worker.kill()
        slot.worker = await AgentProcess.start(
            self.settings.path, self._source, self.settings.tokenizer, time_limit=LOAD_SECONDS
        )
        return slot.worker

    async def _stop(self) -> None:
        workers = [slot.worker for slot in self._slots if slot.worker is not None]
        await asyncio.gather(*(worker.kill() for worker in workers))

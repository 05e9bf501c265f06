"""Two replicas and two learners that push to them, kept alive over many rounds."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from quartet.clients import LearnerClient
from quartet.errors import InfraError
from quartet.testing.tiny import TinyShape, make_tiny_model
from quartet.types import PushBackend, PushResult, SequenceBatch
from tests.integration.push_faults.cast import (
    Nursery,
    Process,
    start_learner,
    start_rollout,
    watchdog,
)
from tests.integration.push_faults.served import Traffic, check_served

SHAPE = TinyShape(hidden=128, intermediate=8192, layers=5)
BUCKET_BYTES = 26_000_000
"""Two layers a bucket, and three buckets: more than the sockets hold, so that a sender waits."""
NUM_BUCKETS = 3
SLACK = 0.0 if "QUARTET_FAULT_ROUNDS" in os.environ else 30.0
"""Seconds: `make test-faults` holds the learner to its times, `make test` to an end alone."""
FREE_WITHIN = 2.0 + SLACK
"""Seconds beyond its deadline after which the learner must be free."""
ROUND_SECONDS = 200.0
"""A round that lasts longer hangs."""


@dataclass(kw_only=True)
class Outcome:
    """What a push came to."""

    result: PushResult | None = None
    error: str = ""
    ended: float = 0.0
    """When the learner was free again, by time.monotonic()."""

    def of(self, address: str) -> tuple[bool, str]:
        """Whether a replica took it, and what is said of it."""
        if self.result is None:
            return False, self.error
        found = next(r for r in self.result.replicas if r.address == address)
        return found.committed, f"{found.address}: {found.failed_phase}: {found.error}"


class Stage:
    """Everybody, and who should serve what.

    Attributes:
        version: what all replicas serve.
        models: the weights of each version that may be served now.
        holds: how long the learner was held after each fault, in seconds.
    """

    def __init__(self, folder: Path) -> None:
        self._folders = [
            make_tiny_model(folder / f"model{seed}", shape=SHAPE, seed=seed) for seed in range(3)
        ]
        self._weights = [AutoModelForCausalLM.from_pretrained(f) for f in self._folders]
        self.nursery = Nursery(folder)
        self.replicas: list[Process] = []
        self.learners: list[Process] = []
        self.version = 0
        self.models: dict[int, torch.nn.Module] = {0: self._weights[0]}
        self.holds: dict[str, list[float]] = {}
        self._last_version = 0
        self._next_learner = 0

    async def open(self) -> None:
        """Start everybody."""
        starts = [start_rollout(self.nursery, self._folders[0]) for _ in range(2)]
        starts += [start_learner(self.nursery, folder) for folder in self._folders[1:]]
        first, second, *self.learners = await asyncio.gather(*starts)
        self.replicas = [first, second]
        await self.push_to_all(self.turn())

    def turn(self) -> int:
        """The learner whose weights are not those that serve."""
        self._next_learner = 1 - self._next_learner
        return self._next_learner

    def new_version(self, learner: int) -> int:
        """The next version, of this learner's weights."""
        self._last_version += 1
        self.models[self._last_version] = self._weights[1 + learner]
        return self._last_version

    async def push(
        self, learner: int, version: int, *, to=None, group_timeout=20.0, bucket_bytes=BUCKET_BYTES
    ) -> Outcome:
        """Have a learner push, and see that its thread is free."""
        outcome = Outcome()
        to = to or self.replicas
        async with LearnerClient(self.learners[learner].address, retry=False) as client:
            try:
                outcome.result = await client.push_weights(
                    policy_version=version,
                    addresses=[replica.address for replica in to],
                    backend=PushBackend.GLOO,
                    bucket_bytes=bucket_bytes,
                    group_timeout=group_timeout,
                )
            except InfraError as error:
                outcome.error = str(error)
            if not self.learners[learner].is_killed:
                await client.forward([SequenceBatch.of([[5, 6, 7]])])
        outcome.ended = time.monotonic()
        return outcome

    async def push_to_all(self, learner: int) -> None:
        """Bring a new version to everybody, and see that it serves."""
        version = self.new_version(learner)
        outcome = await self.push(learner, version)
        told = [outcome.of(replica.address) for replica in self.replicas]
        assert all(committed for committed, _ in told), told
        before, self.version = self.version, version
        known = {v: self.models[v] for v in {before, version}}
        for replica in self.replicas:
            assert await check_served(replica.address, {version}, known) == version

    @asynccontextmanager
    async def round(self):
        """One round of a case: under a watchdog, with completions under way all the time."""
        async with watchdog(self.nursery, ROUND_SECONDS):
            await self._mend()
            traffic = Traffic([replica.address for replica in self.replicas], self.version)
            try:
                async with traffic.flowing():
                    yield traffic
                await asyncio.to_thread(traffic.check, self.models)
                self.models = {self.version: self.models[self.version]}
            finally:
                for process in self.nursery.alive:
                    process.go()

    def note(self, case: str, seconds: float) -> None:
        """Keep how long a fault held the learner."""
        self.holds.setdefault(case, []).append(seconds)

    async def restart(self, replica: Process) -> Process:
        """A new process in the place of a dead one."""
        await asyncio.to_thread(replica.wait_dead, 10)
        made = await start_rollout(self.nursery, self._folders[0])
        self.replicas[self.replicas.index(replica)] = made
        self.models[0] = self._weights[0]
        return made

    async def restart_learner(self, learner: int) -> None:
        """The same for a learner."""
        await asyncio.to_thread(self.learners[learner].wait_dead, 10)
        self.learners[learner] = await start_learner(self.nursery, self._folders[1 + learner])

    async def add_replica(self) -> Process:
        """One more replica, which nobody has pushed to."""
        self.models[0] = self._weights[0]
        return await start_rollout(self.nursery, self._folders[0])

    async def _mend(self) -> None:
        """After a round that failed in the middle: everybody lives, and serves one version."""
        for process in [*self.replicas, *self.learners]:
            (process.folder / "fault.json").unlink(missing_ok=True)
            process.signal(signal.SIGCONT)
        damaged = len(self.replicas) != 2 or len(self.models) != 1
        self.replicas = self.replicas[:2]
        for replica in list(self.replicas):
            if replica.is_dead:
                await self.restart(replica)
        for learner, process in enumerate(self.learners):
            if process.is_dead:
                await self.restart_learner(learner)
        if damaged:
            await self.push_to_all(self.turn())

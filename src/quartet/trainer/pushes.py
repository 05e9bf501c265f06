"""Pushes of the policy: who serves which version, and what is done when a push is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from quartet.errors import FatalError, InfraError
from quartet.obs.metrics import POLICY_VERSION
from quartet.obs.progress import Progress
from quartet.trainer.launch import Launcher
from quartet.trainer.rest import Rest
from quartet.trainer.rooms import Sampler, Trainee
from quartet.types import PauseMode, PushResult

PUSH_REPEATS = 2
"""How often a push that no replica took is tried again before it ends the run."""


class Pushes:
    """Brings the policy's weights to the rollout replicas, and counts versions."""

    def __init__(
        self,
        policy: Trainee,
        sampler: Sampler,
        launcher: Launcher,
        *,
        rest: Rest,
        barrier: bool = False,
        run_id: str,
        policy_version: int,
        progress: Progress,
    ) -> None:
        """Push the weights of `policy`.

        Args:
            policy: The learner.
            sampler: The rollout replicas.
            launcher: Knows of rollout services that are being started again.
            rest: Who is awake when.
            barrier: Let completions under way end before weights are pushed, and hold later ones
                until they are: no completion has tokens of two versions. Without it generation
                goes on, and each engine swaps its weights between two tokens.
            run_id: Begins the request ids.
            policy_version: The highest version that any service has seen.
            progress: Where to show a push.
        """
        self._policy = policy
        self._sampler = sampler
        self._rest = rest
        self._barrier = barrier
        self._launcher = launcher
        self._run_id = run_id
        self._progress = progress
        self.policy_version = policy_version
        """Version that the rollout services were given last."""
        self.count = 0
        """Pushes of the run, that at the start included."""
        self.pause_seconds = 0.0
        """How long the last push waited for completions under way."""
        self._sends = 0
        self.weights = asyncio.Lock()
        """Held by whoever moves the policy's weights, from the first optimizer step to the end of
        the push, and while a replica catches up: what is pushed in between would be neither."""

    async def start(self) -> None:
        """Push for the first time: the rollout services may hold anything, and be paused."""
        await self._sampler.resume()
        self._sampler.catch_up = self.catch_up
        async with self.weights:
            await self.push("start")

    async def push(self, when: str) -> None:
        """Have all rollout replicas serve the policy as it is now. The caller holds `weights`.

        Raises:
            FatalError: none of them took it.
            UnavailableError: there is none.
        """
        async with self._rest.pushing(), self._held(when):
            await self._push(when)

    async def catch_up(self, address: str) -> None:
        """Give one rollout replica the weights that the others have. Waits for optimizer steps.

        Raises:
            InfraError: it did not take them.
        """
        async with self.weights:
            # The push that this has waited for may have reached it.
            if self._sampler.has(address, self.policy_version):
                return
            async with self._rest.learner_awake():
                result = await self._send(self.policy_version, f"rollout at {address}:", [address])
            if isinstance(result, str):
                raise InfraError(result, reason="NOT_CAUGHT_UP")
            self._sampler.pushed(self.policy_version, result)

    @asynccontextmanager
    async def _held(self, when: str) -> AsyncGenerator[None]:
        """Hold generation as long as the context lasts, so that a version begins everywhere."""
        if not self._barrier:
            yield
            return
        began = time.monotonic()
        try:
            with self._progress.phase(f"{when} pause") as phase:
                phase.waiting_for = "completions under way"
                await self._sampler.pause(PauseMode.DRAIN)
            self.pause_seconds = time.monotonic() - began
            yield
        finally:
            await self._sampler.resume()

    async def _push(self, when: str) -> None:
        version = self.policy_version + 1
        repeats = 0
        while isinstance(
            result := await self._send(version, when, await self._sampler.to_push_to()), str
        ):
            # A rollout service that just died and is started again is worth another push.
            if await self._launcher.settle():
                continue
            # One lost call must not cost a run: the services may be well.
            if repeats == PUSH_REPEATS:
                what = f"version {version} of the policy in {1 + repeats} pushes: {result}"
                raise FatalError(f"no rollout service took {what}", reason="PUSH_FAILED")
            repeats += 1
            again = f"trying again, {repeats} of at most {PUSH_REPEATS}"
            self._progress.say(f"{when} push: {again}: {result}")
        self.policy_version = version
        self._sampler.pushed(version, result)
        POLICY_VERSION.set(version)
        self.count += 1

    async def _send(self, version: int, when: str, to: Sequence[str]) -> PushResult | str:
        """Push once; returns what came of it, or why no replica took it."""
        self._sends += 1
        with self._progress.phase(f"{when} push") as phase:
            phase.waiting_for = "learner and rollout"
            try:
                result = await self._policy.push_weights(
                    request_id=f"{self._run_id}/push/{version}/{self._sends}",
                    policy_version=version,
                    addresses=to,
                )
            except InfraError as error:
                return str(error)
            phase.note = f"{result.total_bytes / 1e6:.1f} MB as version {version}"
        problems = [
            f"{r.address} does not have version {version}: {r.failed_phase} failed, {r.error}"
            for r in result.replicas
            if not r.committed
        ]
        for problem in problems:
            self._progress.say(f"rollout {problem}")
        return "; ".join(problems) if len(problems) == len(result.replicas) else result

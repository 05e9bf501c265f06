"""The real players: clients and pools behind the protocols of `rooms`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from quartet.clients import (
    Client,
    LearnerClient,
    RefClient,
    ReplicaPool,
    RewardClient,
    RolloutClient,
)
from quartet.errors import InfraError, StateError
from quartet.types import (
    ForwardOutput,
    ForwardResult,
    GenerateRequest,
    GenerateResult,
    LoadCheckpointResult,
    PauseMode,
    PushBackend,
    PushResult,
    RunSpec,
    ScoreBatch,
    ScoreRequest,
    SequenceBatch,
    StartRunResult,
    TrainResult,
    TrainSamples,
    TrainStep,
)

AnyClient = TypeVar("AnyClient", bound=Client)

STALE_PAUSE_SECONDS = 0.2
"""Pause before a stale replica is asked again: nothing tells a caller of a push to it."""

TOO_OLD = frozenset({"POLICY_VERSION_TOO_OLD", "VERSION_TOO_OLD"})
"""Reasons of a replica that has older weights than Generate asks for."""

MOST_CATCH_UPS = 3
"""How often a call has a stale replica pushed to before it gives up."""


class PooledSampler:
    """`Sampler` over rollout replicas."""

    def __init__(self, pool: ReplicaPool[RolloutClient], *, patience: float = 0.0) -> None:
        """Use a pool that somebody else closes.

        Args:
            pool: the replicas.
            patience: seconds to wait for a replica with the asked-for version, when all that serve
                are older: one that was started again serves before it has been pushed to.
        """
        self._pool = pool
        self._patience = patience
        self._catching_up = asyncio.Lock()
        self.on_stale: Callable[[str, str], Awaitable[None]] | None = None
        """Called with role and address of a replica that fell back to older weights than asked
        for, as one does that was started again by somebody else."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Complete prompts on the replica with the least to do."""
        limit = time.monotonic() + self._patience
        catch_ups = 0
        while True:
            try:
                return await self._generate(request)
            except StateError as error:
                if error.info.reason in TOO_OLD and self.on_stale and catch_ups < MOST_CATCH_UPS:
                    catch_ups += 1
                    await self._catch_up(request.min_policy_version or 0, self.on_stale)
                elif time.monotonic() >= limit:
                    raise
                else:
                    await asyncio.sleep(STALE_PAUSE_SECONDS)

    async def pause(self, mode: PauseMode) -> None:
        """Hold generation on all replicas that serve."""
        await self._tell(self._pool.serving(), lambda client: client.pause(mode))

    async def resume(self) -> None:
        """Go on, also where a replica seemed away."""
        await self._tell(self._pool.clients, lambda client: client.resume())

    async def sleep(self, level: int) -> None:
        """Free the memory of all replicas."""
        await _each(self._pool, lambda client: client.sleep(level=level))

    async def wake(self, tags: Sequence[str] = ()) -> None:
        """Take the memory of all replicas back."""
        await _each(self._pool, lambda client: client.wake(tags=tags))

    async def _tell(
        self, clients: Sequence[RolloutClient], call: Callable[[RolloutClient], Awaitable[object]]
    ) -> None:
        async def one(client: RolloutClient) -> None:
            # One that is away or still loads holds nothing, and comes back holding nothing.
            with contextlib.suppress(InfraError, StateError):
                await call(client)

        await asyncio.gather(*(one(client) for client in clients))

    async def _catch_up(self, oldest: int, on_stale: Callable[[str, str], Awaitable[None]]) -> None:
        """Report each serving replica with older weights; calls that wait find it caught up."""
        async with self._catching_up:
            for client in self._pool.serving():
                # One that is gone again is none to push to.
                with contextlib.suppress(InfraError):
                    info = await client.get_info()
                    if info.policy_version < oldest:
                        await on_stale("rollout", client.address)

    async def _generate(self, request: GenerateRequest) -> GenerateResult:
        return await self._pool.call(
            "Generate",
            lambda client, left: client.generate(
                request_id=request.request_id,
                groups=request.groups,
                sampling=request.sampling,
                logprob_kind=request.logprob_kind,
                min_policy_version=request.min_policy_version,
                isolated=request.isolated,
                timeout=left,
            ),
        )


class PooledJudge:
    """`Judge` over reward replicas."""

    def __init__(self, pool: ReplicaPool[RewardClient]) -> None:
        """Use a pool that somebody else closes."""
        self._pool = pool

    async def score(self, request: ScoreRequest) -> ScoreBatch:
        """Score completions on the replica with the least to do."""
        return await self._pool.call(
            "Score",
            lambda client, left: client.score(
                request_id=request.request_id,
                items=request.items,
                tokenizer_fingerprint=request.tokenizer_fingerprint,
                timeout=left,
            ),
        )

    async def sleep(self) -> None:
        """Free the memory of all replicas."""
        await _each(self._pool, lambda client: client.sleep())

    async def wake(self) -> None:
        """Take it again."""
        await _each(self._pool, lambda client: client.wake())


class PooledReference:
    """`Reference` over replicas of the reference model."""

    def __init__(
        self, pool: ReplicaPool[RefClient], *, max_tokens_per_micro_batch: int | None = None
    ) -> None:
        """Use a pool that somebody else closes."""
        self._pool = pool
        self._max_tokens = max_tokens_per_micro_batch

    async def compute_logprobs(
        self, chunks: Sequence[SequenceBatch], *, temperature: float
    ) -> list[NDArray[np.float32]]:
        """[N] log-probabilities of each chunk's tokens."""
        return await self._pool.call(
            "ComputeLogprobs",
            lambda client, left: client.compute_logprobs(
                chunks,
                temperature=temperature,
                max_tokens_per_micro_batch=self._max_tokens,
                timeout=left,
            ),
        )

    async def sleep(self) -> None:
        """Free the memory of all replicas."""
        await _each(self._pool, lambda client: client.sleep())

    async def wake(self) -> None:
        """Take it again."""
        await _each(self._pool, lambda client: client.wake())


class RemoteTrainee:
    """`Trainee` at one learner service."""

    def __init__(
        self,
        client: LearnerClient,
        *,
        forward_tokens: int | None = None,
        rollout_addresses: Sequence[str] = (),
        backend: PushBackend | None = None,
        bucket_bytes: int = 64 << 20,
        group_timeout: float = 30.0,
        push_folder: str = "",
    ) -> None:
        """Use a client that somebody else closes.

        Args:
            client: the learner.
            forward_tokens: most tokens in one forward pass on one rank.
            rollout_addresses: who gets the weights in a push.
            backend: how they travel; None lets the learner look.
            bucket_bytes: size of a bucket.
            group_timeout: seconds that one wait of a push may take.
            push_folder: where backend file writes.
        """
        self._client = client
        self._forward_tokens = forward_tokens
        self._addresses = tuple(rollout_addresses)
        self._backend = backend
        self._bucket_bytes = bucket_bytes
        self._group_timeout = group_timeout
        self._push_folder = push_folder

    async def start_run(self, spec: RunSpec) -> StartRunResult:
        """Build optimizer and schedule. A repeat with the same run id changes nothing."""
        return await self._client.start_run(spec, request_id=f"{spec.run_id}/start")

    async def forward(
        self, chunks: Sequence[SequenceBatch], *, output: ForwardOutput, temperature: float = 1.0
    ) -> list[ForwardResult]:
        """Evaluate the model on each chunk."""
        return await self._client.forward(
            chunks,
            output=output,
            temperature=temperature,
            max_tokens_per_micro_batch=self._forward_tokens,
        )

    async def train(self, step: TrainStep, samples: Sequence[TrainSamples]) -> TrainResult:
        """Take one optimizer step."""
        return await self._client.train(step, samples)

    async def push_weights(
        self, *, request_id: str, policy_version: int, addresses: Sequence[str] | None = None
    ) -> PushResult:
        """Push the weights to rollout replicas; None: to all of them."""
        return await self._client.push_weights(
            request_id=request_id,
            policy_version=policy_version,
            addresses=self._addresses if addresses is None else addresses,
            backend=self._backend,
            bucket_bytes=self._bucket_bytes,
            group_timeout=self._group_timeout,
            folder=self._push_folder,
        )

    async def export_model(
        self, *, request_id: str, folder: str, config_values: dict[str, float] | None = None
    ) -> str:
        """Write a folder that transformers opens."""
        saved = await self._client.export_model(
            folder=folder, config_values=config_values or {}, request_id=request_id
        )
        return saved.path

    async def save_checkpoint(
        self, *, request_id: str, folder: str, tag: str, trainer_state: bytes
    ) -> str:
        """Write a checkpoint."""
        saved = await self._client.save_checkpoint(
            folder=folder, tag=tag, trainer_state=trainer_state, request_id=request_id
        )
        return saved.path

    async def load_checkpoint(self, *, folder: str, tag: str) -> LoadCheckpointResult:
        """Go on from a checkpoint."""
        return await self._client.load_checkpoint(folder=folder, tag=tag)

    async def sleep(self) -> None:
        """Free the learner's device."""
        await self._client.sleep()

    async def wake(self) -> None:
        """Take its memory back."""
        await self._client.wake()


async def _each(
    pool: ReplicaPool[AnyClient], call: Callable[[AnyClient], Awaitable[object]]
) -> None:
    """Make a call to every replica at once. One that is away comes back awake."""

    async def one(client: AnyClient) -> None:
        with contextlib.suppress(InfraError):
            await call(client)

    await asyncio.gather(*(one(client) for client in pool.clients))

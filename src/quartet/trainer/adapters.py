"""The real players: clients and pools behind the protocols of `rooms`."""

from __future__ import annotations

import asyncio
import contextlib
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
    ReplicaState,
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

STALE_REASONS = frozenset({"POLICY_VERSION_TOO_OLD", "VERSION_TOO_OLD", "REPLICA_STALE"})
"""Reasons of a replica that refuses Generate because it has no weights, or older ones."""


class PooledSampler:
    """`Sampler` over rollout replicas."""

    def __init__(self, pool: ReplicaPool[RolloutClient], *, sleeps: bool = False) -> None:
        """Use a pool that somebody else closes.

        Args:
            pool: the replicas.
            sleeps: the run puts replicas to sleep, so that one asleep is where it should be.
        """
        self._pool = pool
        self._sleeps = sleeps
        self._version: int | None = None
        """Version of the last push; None before the first."""
        self._holds: dict[str, tuple[str, int]] = {}
        """By address: the process that took a push last, and the version."""
        self.catch_up: Callable[[str], Awaitable[None]] | None = None
        """Called with the address of a replica that lacks the weights of the last push."""
        pool.stale_reasons = STALE_REASONS
        pool.admit(prepare=self._prepare)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Complete prompts on the replica with the fewest samples to make."""
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
            weight=sum(group.num_samples for group in request.groups),
        )

    async def to_push_to(self) -> tuple[str, ...]:
        """Addresses of the replicas that can take weights now; waits until there is one.

        Raises:
            UnavailableError: nobody came in the pool's patience.
        """
        return tuple(client.address for client in await self._pool.wait_fitting())

    def pushed(self, policy_version: int, result: PushResult) -> None:
        """Note who took a version. Calls go to those that have it, and the others catch up."""
        self._version = policy_version
        took = {r.address: (r.replica, policy_version) for r in result.replicas if r.committed}
        self._holds |= took
        self._pool.prepared(took, lambda client: not self.has(client.address, policy_version))

    def has(self, address: str, policy_version: int) -> bool:
        """Whether a replica took a version in a push, as far as is known."""
        return address in self._holds and self._holds[address][1] == policy_version

    async def pause(self, mode: PauseMode) -> None:
        """Hold generation on all replicas that generate."""
        await self._tell(self._pool.fitting(), lambda client: client.pause(mode))

    async def resume(self) -> None:
        """Go on, also where a replica seemed away, or ends its last calls."""
        everybody = [*self._pool.accepted(), *self._pool.leaving]
        await self._tell(everybody, lambda client: client.resume())

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
            # One that is away or still loads holds nothing, and is resumed before it serves.
            with contextlib.suppress(InfraError, StateError):
                await call(client)

        await asyncio.gather(*(one(client) for client in clients))

    async def _prepare(self, client: RolloutClient) -> None:
        """Let a replica have the weights of the last push, and go on if it was left paused."""
        if self._version is None or self.catch_up is None:
            return
        info = await client.get_info()
        if info.state is ReplicaState.ASLEEP and not self._sleeps:
            await client.wake()
        await client.resume()
        held = (info.info.replica, info.policy_version)
        # The version alone proves nothing: another run may have pushed one of the same number.
        is_same = self._holds.get(client.address) == held and info.policy_version == self._version
        if is_same and info.state is not ReplicaState.STALE:
            return
        self._holds.pop(client.address, None)
        await self.catch_up(client.address)


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
            weight=len(request.items),
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
            weight=sum(chunk.num_tokens for chunk in chunks),
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
        backend: PushBackend | None = None,
        bucket_bytes: int = 64 << 20,
        group_timeout: float = 30.0,
        push_folder: str = "",
    ) -> None:
        """Use a client that somebody else closes.

        Args:
            client: the learner.
            forward_tokens: most tokens in one forward pass on one rank.
            backend: how they travel; None lets the learner look.
            bucket_bytes: size of a bucket.
            group_timeout: seconds that one wait of a push may take.
            push_folder: where backend file writes.
        """
        self._client = client
        self._forward_tokens = forward_tokens
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
        self, *, request_id: str, policy_version: int, addresses: Sequence[str]
    ) -> PushResult:
        """Push the weights to rollout replicas."""
        return await self._client.push_weights(
            request_id=request_id,
            policy_version=policy_version,
            addresses=addresses,
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
    """Make a call to every replica at once. One that is away or loads comes to be awake."""
    present = pool.fitting()

    async def one(client: AnyClient) -> None:
        with contextlib.suppress(InfraError):
            try:
                await call(client)
            except StateError:
                if client in present:
                    raise

    await asyncio.gather(*(one(client) for client in pool.accepted()))

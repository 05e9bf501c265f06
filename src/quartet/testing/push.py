"""Weight pushes without gRPC: a sender and its replicas in one process, over the real transport.

`LocalReplica` is a `PushTarget` around a real `WeightInbox`, with hooks to fail in each phase.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from quartet import __version__
from quartet.types import (
    PushBackend,
    ReceiveEvent,
    ReplicaState,
    RolloutInfo,
    ServerInfo,
    TensorSpec,
    WeightManifest,
)
from quartet.types.requests import (
    AbortWeightsRequest,
    AbortWeightsResult,
    CommitWeightsRequest,
    CommitWeightsResult,
    PrepareWeightsRequest,
    PrepareWeightsResult,
    ReceiveWeightsRequest,
)
from quartet.weights import WeightInbox, pack_bucket, plan_buckets

if TYPE_CHECKING:
    import torch

SHAPES: Mapping[str, tuple[int, ...]] = {
    "embed": (50, 8),
    "a": (8, 8),
    "bias": (8,),
    "scalar": (),
    "b": (33, 8),
}
"""Tensors of the little model that these helpers push."""


def make_manifest(bucket_bytes: int = 1024, **changes: tuple[int, ...]) -> WeightManifest:
    """Manifest of SHAPES with a tied head; `changes` replace or add shapes."""
    shapes = {**SHAPES, **changes}
    specs = tuple(TensorSpec(name=n, dtype="float32", shape=s) for n, s in shapes.items())
    return WeightManifest(tensors=specs, bucket_bytes=bucket_bytes, aliases={"head": "embed"})


def make_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tensors of SHAPES."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator) for n, s in SHAPES.items()}


class CountingSource:
    """A source of buckets that says how far it was drained.

    Attributes:
        given: buckets asked for.
        ended: how often it was drained to its end.
    """

    def __init__(self, manifest: WeightManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        self._buckets = plan_buckets(manifest)
        self._tensors = tensors
        self.given = 0
        self.ended = 0

    def __call__(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield every bucket in order."""
        for bucket in self._buckets:
            self.given += 1
            yield bucket.index, pack_bucket(bucket, self._tensors)
        self.ended += 1


class LocalReplica:
    """A replica in this process.

    Attributes:
        weights: what it serves, by name.
        version: policy version of those.
        num_ranks: ranks that it takes, as it says.
        calls: phases entered, in order.
        before: awaited when a phase ("prepare", "receive", "commit", "abort") is entered.
        on_event: sees, changes or fails each event of a receive.
    """

    def __init__(self, address: str = "127.0.0.1:1") -> None:
        import torch

        self.address = address
        self.weights = {n: torch.zeros(s) for n, s in SHAPES.items()}
        self.version = 0
        self.num_ranks = 1
        self.inbox = WeightInbox(wanted=make_manifest, replica=address)
        self.calls: list[str] = []
        self.before: dict[str, Callable[[], Awaitable[object]]] = {}
        self.on_event: Callable[[ReceiveEvent], ReceiveEvent] = lambda event: event

    async def get_info(self, *, timeout: float | None = None) -> RolloutInfo:
        """What it is."""
        return RolloutInfo(
            info=ServerInfo(
                service="rollout", server_version=__version__, replica=f"replica {self.address}"
            ),
            engine="local",
            state=ReplicaState.SERVING,
            policy_version=self.version,
            push_backends=(PushBackend.GLOO, PushBackend.IPC),
            push_ranks=(self.num_ranks, self.num_ranks),
        )

    async def prepare_weights(
        self, request: PrepareWeightsRequest, *, timeout: float | None = None
    ) -> PrepareWeightsResult:
        """First phase."""
        async with asyncio.timeout(timeout):
            await self._enter("prepare")
            await self.inbox.prepare(request)
        return PrepareWeightsResult(replica=f"replica {self.address}")

    async def receive_weights(
        self, request: ReceiveWeightsRequest, *, timeout: float | None = None
    ) -> AsyncIterator[ReceiveEvent]:
        """Second phase."""
        await self._enter("receive")
        async for event in self.inbox.receive(request):
            yield self.on_event(event)

    async def commit_weights(
        self, request: CommitWeightsRequest, *, timeout: float | None = None
    ) -> CommitWeightsResult:
        """Third phase."""
        await self._enter("commit")
        await self.inbox.commit(request, self._load)
        return CommitWeightsResult(policy_version=request.policy_version)

    async def abort_weights(
        self, request: AbortWeightsRequest, *, timeout: float | None = None
    ) -> AbortWeightsResult:
        """Give up."""
        await self._enter("abort")
        self.inbox.abort(request)
        return AbortWeightsResult(policy_version=self.version, state=ReplicaState.SERVING)

    def has(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """True when exactly these serve."""
        import torch

        return all(torch.equal(self.weights[n], t) for n, t in tensors.items())

    async def _enter(self, phase: str) -> None:
        self.calls.append(phase)
        if phase in self.before:
            await self.before[phase]()

    async def _load(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> int:
        for name, tensor in tensors:
            self.weights[name].copy_(tensor)
        self.version = version
        return 0

"""Where the bytes of one push arrive in a replica, and wait there for the commit.

`OwnLanding` is the process that answers the sender's calls. An engine may give it other memory
(`Staging`), or bring a `Landing` of its own: its weights may lie in other processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from quartet.errors import InfraError, RequestError
from quartet.types import IpcSegment, PushBackend
from quartet.types.requests import PrepareWeightsRequest
from quartet.weights.digest import bucket_digest
from quartet.weights.group import (
    connect_store,
    form_group,
    join_address,
    local_address_towards,
)
from quartet.weights.ipc import IpcTransport, Segment, open_segment, out_of_reach, segment_layout
from quartet.weights.manifest import Bucket, plan_buckets
from quartet.weights.tensors import empty_bucket, unpack_bucket
from quartet.weights.transport import FileTransport, GroupTransport, Transport
from quartet.weights.worker import Worker

if TYPE_CHECKING:
    import torch

NamedTensors: TypeAlias = "Iterable[tuple[str, torch.Tensor]]"


class Landing(Protocol):
    """The receiving end of one push. Belongs to one event loop."""

    @property
    def num_ranks(self) -> int:
        """Ranks that it takes in the group, from the one on that the sender gives it."""
        ...

    async def join(self) -> None:
        """Make room and meet the other members.

        Raises:
            InfraError: No space, or the group did not form in time.
        """
        ...

    async def receive(self, bucket: Bucket) -> None:
        """Take part in the transfer of the next bucket.

        Raises:
            QuartetError: The group broke: nothing more will come.
        """
        ...

    async def digest(self, bucket: Bucket) -> str:
        """Digest of a bucket that has arrived. May run while the next one arrives.

        Raises:
            Exception: This side cannot use the bucket; the rest of the push can be received.
        """
        ...

    def tensors(self) -> NamedTensors:
        """What is handed to the engine at the commit."""
        ...

    def close(self, *, abort: bool) -> None:
        """Let go of everything, also in the middle. Returns at once.

        Args:
            abort: Give up what is under way.
        """
        ...


MakeLanding: TypeAlias = Callable[[PrepareWeightsRequest], Landing]


class Staging(Protocol):
    """Memory for the tensors of one push."""

    def buffers(self, buckets: Sequence[Bucket]) -> list[torch.Tensor]:
        """One flat buffer a bucket, [numel], all made before the first arrives. May block.

        Two buckets in a row never share memory; others may.
        """
        ...

    def keep(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Take a bucket that has arrived whole, before its buffer serves for another. May block."""
        ...

    def tensors(self, buckets: Sequence[Bucket]) -> NamedTensors:
        """The tensors in them."""
        ...

    def close(self) -> None:
        """Let go of the memory."""
        ...


class OwnStaging:
    """Memory of this process, or of its device."""

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._buffers: list[torch.Tensor] = []

    def buffers(self, buckets: Sequence[Bucket]) -> list[torch.Tensor]:
        """Uninitialised; raises InfraError without room for it."""
        check_space(sum(bucket.nbytes for bucket in buckets), self._device)
        self._buffers = [empty_bucket(bucket, self._device) for bucket in buckets]
        return self._buffers

    def keep(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """It lies where it stays."""

    def tensors(self, buckets: Sequence[Bucket]) -> NamedTensors:
        """Views of the buffers."""
        for bucket, flat in zip(buckets, self._buffers, strict=True):
            yield from unpack_bucket(bucket, flat)

    def close(self) -> None:
        """Forget the buffers."""
        self._buffers = []


class OwnLanding:
    """Receives in this process, on threads that can be left behind."""

    def __init__(self, request: PrepareWeightsRequest, device: str, staging: Staging) -> None:
        """Make a landing that has not joined yet.

        Args:
            request: The push.
            device: Device of this member in a NCCL group.
            staging: Where the tensors wait.
        """
        self._request = request
        self._device = device
        self._staging = staging
        self._buckets = plan_buckets(request.manifest)
        self._buffers: list[torch.Tensor] = []
        self._receiver = Worker(f"quartet-receive-{request.epoch}")
        self._digester = Worker(f"quartet-digest-{request.epoch}")
        self._transport: Transport | None = None

    @property
    def num_ranks(self) -> int:
        """This process."""
        return 1

    async def join(self) -> None:
        """Make room and join; see the Protocol."""
        await asyncio.wrap_future(self._receiver.submit(self._make_room))
        await asyncio.wrap_future(self._receiver.submit(self._open))

    async def receive(self, bucket: Bucket) -> None:
        """Take part in the transfer; see the Protocol."""
        assert self._transport is not None, "join comes first"
        flat = self._buffers[bucket.index]
        job = self._receiver.submit(self._transport.receive, bucket, flat)
        await asyncio.wrap_future(job)

    async def digest(self, bucket: Bucket) -> str:
        """Of the bytes as they lie here."""
        job = self._digester.submit(self._digest, bucket, self._buffers[bucket.index])
        return await asyncio.wrap_future(job)

    def tensors(self) -> NamedTensors:
        """What the staging area makes of them."""
        return self._staging.tensors(self._buckets)

    def close(self, *, abort: bool) -> None:
        """Let go; see the Protocol. A thread that is stuck keeps its own buffer alive."""
        self._buffers = []
        self._staging.close()
        if self._transport is not None:
            self._transport.close(abort=abort)
        else:  # what its thread may be making just now
            self._receiver.submit(self._close_late)
        self._receiver.close()
        self._digester.close()

    def _make_room(self) -> None:
        self._buffers = self._staging.buffers(self._buckets)
        if self._request.backend is PushBackend.NCCL:
            _leave_default_stream(self._device)
            self._digester.submit(_leave_default_stream, self._device)

    def _open(self) -> None:
        self._transport = open_transport(self._request, self._device)

    def _close_late(self) -> None:
        self._buffers = []
        self._staging.close()
        if self._transport is not None:
            self._transport.close(abort=True)

    def _digest(self, bucket: Bucket, flat: torch.Tensor) -> str:
        digest = bucket_digest(flat)
        self._staging.keep(bucket, flat)
        return digest


class IpcLanding:
    """Stages nothing: the tensors wait in the sender's memory, where this process reads them.

    When a sender on this machine dies, its memory is let go of: nobody will commit it.
    """

    def __init__(self, request: PrepareWeightsRequest) -> None:
        self._handle = request.rendezvous.ipc
        self._buckets = plan_buckets(request.manifest)
        self._reader = Worker(f"quartet-ipc-{request.epoch}")
        self._segment: Segment | None = None
        self._memory: IpcTransport | None = None
        self._sender = -1
        """Descriptor that can be read when the sender's process has ended."""

    @property
    def num_ranks(self) -> int:
        """This process."""
        return 1

    async def join(self) -> None:
        """Open the sender's memory; RequestError where this process cannot see it."""
        await asyncio.wrap_future(self._reader.submit(self._open))
        if self._handle is not None and not self._handle.gpu_uuid:
            with contextlib.suppress(OSError):  # it has just ended, or the system has no pidfd
                self._sender = os.pidfd_open(self._handle.process_id)
                asyncio.get_running_loop().add_reader(self._sender, self._sender_ended)

    async def receive(self, bucket: Bucket) -> None:
        """It is there: the sender writes all before it asks for the first."""

    async def digest(self, bucket: Bucket) -> str:
        """Of the bytes as this process sees them."""
        return await asyncio.wrap_future(self._reader.submit(self._digest, bucket))

    def tensors(self) -> NamedTensors:
        """Views of the sender's memory, all at once: they hold it though the sender may end."""
        assert self._memory is not None, "join comes first"
        memory = self._memory
        return [pair for b in self._buckets for pair in unpack_bucket(b, memory.flat(b))]

    def let_go(self) -> None:
        """Close a memory whose tensors are in place now, from any thread.

        The sender frees a GPU's when the commit is answered: the copies out of it must be done.
        """
        if self._segment is not None:
            self._segment.settle()
            self._segment.close()

    def close(self, *, abort: bool) -> None:
        """Let go; see the Protocol."""
        self._unwatch()
        if not abort:
            self.let_go()
        self._reader.submit(self._close)  # after a digest that is being computed
        self._reader.close()

    def _open(self) -> None:
        self._segment = _open_memory(self._handle, self._buckets)
        self._memory = IpcTransport(self._segment, self._buckets)

    def _digest(self, bucket: Bucket) -> str:
        assert self._memory is not None, "join comes first"
        return bucket_digest(self._memory.flat(bucket))

    def _close(self) -> None:
        if self._segment is not None:
            self._segment.close()

    def _sender_ended(self) -> None:
        self._unwatch()
        self._reader.submit(self._close)

    def _unwatch(self) -> None:
        if self._sender >= 0:
            asyncio.get_running_loop().remove_reader(self._sender)
            os.close(self._sender)
            self._sender = -1


def _leave_default_stream(device: str) -> None:
    """Let this thread's work on a GPU not queue behind the engine's."""
    import torch

    torch.cuda.set_device(device)
    # The buffers come from there: whatever used their memory before must be done.
    torch.cuda.current_stream().synchronize()
    torch.cuda.set_stream(torch.cuda.Stream())


def own_landing(request: PrepareWeightsRequest, device: str) -> Landing:
    """A landing in memory of this process, of `device` for NCCL; for ipc in the sender's."""
    if request.backend is PushBackend.IPC:
        return IpcLanding(request)
    staging = OwnStaging(device if request.backend is PushBackend.NCCL else "cpu")
    return OwnLanding(request, device, staging)


def open_transport(request: PrepareWeightsRequest, device: str) -> Transport:
    """Join the group of a push, or open its folder. Blocks."""
    if request.backend is PushBackend.FILE:
        return FileTransport(request.rendezvous.folder, owner=False)
    if request.backend is PushBackend.IPC:
        buckets = plan_buckets(request.manifest)
        return IpcTransport(_open_memory(request.rendezvous.ipc, buckets), buckets)
    if request.backend not in (PushBackend.GLOO, PushBackend.NCCL):
        raise RequestError(
            f"push backend {request.backend} is not supported here",
            reason="WEIGHTS_BACKEND_UNSUPPORTED",
            field="backend",
            value=str(request.backend),
            remedy="use gloo, nccl, ipc or file",
        )
    address = request.rendezvous.store_address
    host, port = join_address(address)
    group = form_group(
        backend=request.backend,
        store=connect_store(address, timeout=request.group_timeout),
        group_name=request.rendezvous.group_name,
        rank=request.rank,
        world_size=request.world_size,
        host=local_address_towards(host, port),
        timeout=request.group_timeout,
        device=device,
    )
    return GroupTransport(group)


def _open_memory(handle: IpcSegment | None, buckets: Sequence[Bucket]) -> Segment:
    if handle is None:
        raise out_of_reach("the sender does not say where its memory is", "fill rendezvous.ipc")
    _, needed = segment_layout(buckets)
    return open_segment(handle, needed)


def check_room(request: PrepareWeightsRequest, landing: Landing) -> None:
    """Raise RequestError when the sender's group has no room for all ranks of a landing."""
    end = request.rank + landing.num_ranks
    if end > request.world_size:
        raise RequestError(
            f"this replica takes {landing.num_ranks} ranks from {request.rank} on, and the group "
            f"has {request.world_size}",
            reason="WEIGHTS_RANKS_MISSING",
            field="world_size",
            value=str(request.world_size),
            remedy="lay out as many ranks a replica as GetInfo says in push_ranks",
        )


def check_space(needed: int, device: str) -> None:
    """Raise InfraError when a staging area of `needed` bytes does not fit.

    The old weights keep serving until the commit, so both are there for a moment.
    """
    free = free_bytes(device)
    if free is not None and needed > free:
        raise InfraError(
            f"no room for {needed / 2**30:.2f} GiB of new weights beside the old: "
            f"{free / 2**30:.2f} GiB are free on {device}",
            reason="WEIGHTS_NO_SPACE",
            remedy="give the engine a smaller share of the memory",
        )


def free_bytes(device: str) -> int | None:
    """Bytes free on a device, the host's included; None where the system does not say."""
    if device != "cpu":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None

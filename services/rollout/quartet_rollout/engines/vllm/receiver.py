"""A worker's part in a push: a thread beside the one that computes. Imports no vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING

from quartet.errors import InfraError, QuartetError
from quartet.types import PushBackend
from quartet.weights.landing import (
    IpcLanding,
    Landing,
    NamedTensors,
    OwnLanding,
    OwnStaging,
    Staging,
    free_bytes,
)
from quartet.weights.manifest import Bucket, plan_buckets
from quartet.weights.tensors import torch_dtype
from quartet_rollout.engines.vllm import channel
from quartet_rollout.engines.vllm.channel import (
    Arrived,
    AskRoom,
    Broken,
    Digested,
    Drop,
    Hello,
    Join,
    Joined,
    Order,
    Receive,
    Room,
)
from quartet_rollout.engines.vllm.handover import bucket_buffers, entries_of, mapped

if TYPE_CHECKING:
    import torch


class CopiedStaging:
    """Buckets pass through two buffers on a device into memory that all workers map.

    All workers have the same bytes, so one of them copies.
    """

    def __init__(self, path: str, device: str, *, copies: bool) -> None:
        """Use the shared memory at `path`, on the way through `device`."""
        self._path = path
        self._device = device
        self._copies = copies
        self._places: list[torch.Tensor] = []

    def buffers(self, buckets: Sequence[Bucket]) -> list[torch.Tensor]:
        """Two, in turn; see `quartet.weights.landing.Staging`."""
        import torch

        size = max(bucket.nbytes for bucket in buckets)
        two = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(2)]
        if self._copies:
            self._places = bucket_buffers(self._path, buckets)
        return [two[b.index % 2][: b.nbytes].view(torch_dtype(b.dtype)) for b in buckets]

    def keep(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Copy it to its place."""
        if self._copies:
            self._places[bucket.index].copy_(flat)

    def tensors(self, buckets: Sequence[Bucket]) -> NamedTensors:
        """Views of the shared memory."""
        return mapped(self._path, entries_of(buckets))

    def close(self) -> None:
        """The memory belongs to the service's process."""
        self._places = []


class WorkerReceiver:
    """Does what the service's process orders, on a thread of its own."""

    def __init__(self, path: str, *, rank: int, device: str) -> None:
        """Connect to the socket at `path`.

        Args:
            path: Of the service's process.
            rank: Of this worker in its engine.
            device: Where it computes, "cpu" or "cuda:0".
        """
        self._rank = rank
        self._device = device
        self._path = path
        self._landing: Landing | None = None
        self._epoch = -1
        self._buckets: tuple[Bucket, ...] = ()
        self._work: asyncio.Task[None] | None = None
        thread = threading.Thread(target=self._run, name="quartet-receiver", daemon=True)
        thread.start()

    def tensors(self, epoch: int) -> NamedTensors:
        """What has arrived, for the thread that computes."""
        landing = self._landing
        if landing is None or self._epoch != epoch:
            raise InfraError(f"this worker has no push of epoch {epoch}", reason="EPOCH_LOST")
        return landing.tensors()

    def loaded(self) -> None:
        """All is in place: let go of a sender's memory before the sender hears of it."""
        if isinstance(self._landing, IpcLanding):
            self._landing.let_go()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        reader, writer = await asyncio.open_unix_connection(self._path)
        channel.write(writer, Hello(rank=self._rank))
        try:
            while isinstance(order := await channel.read(reader), Order):
                await self._obey(order, writer)
        finally:  # the service is gone: nobody commits
            await self._drop(abort=True)
            writer.close()

    async def _obey(self, order: Order, writer: asyncio.StreamWriter) -> None:
        match order:
            case AskRoom():
                free = free_bytes(self._device) or 0
                channel.write(writer, Room(epoch=order.epoch, free_bytes=free))
            case Join():
                await self._drop(abort=True)
                self._begin(order)
                self._work = asyncio.ensure_future(self._told(self._join(writer), writer))
            case Receive(epoch=self._epoch):
                self._work = asyncio.ensure_future(self._told(self._receive(writer), writer))
            case Drop(epoch=self._epoch):
                await self._drop(abort=order.abort)

    def _begin(self, order: Join) -> None:
        request = order.request
        self._epoch, self._buckets = request.epoch, plan_buckets(request.manifest)
        device = self._device if request.backend is PushBackend.NCCL else "cpu"
        if request.backend is PushBackend.IPC:
            self._landing = IpcLanding(request)
        else:
            self._landing = OwnLanding(request, device, self._staging(order, device))

    def _staging(self, order: Join, device: str) -> Staging:
        if not order.shared_path:
            return OwnStaging(device)
        return CopiedStaging(order.shared_path, device, copies=self._rank == 0)

    async def _told(self, work: Awaitable[None], writer: asyncio.StreamWriter) -> None:
        """Do it, and say how it failed."""
        epoch = self._epoch
        try:
            await work
        except QuartetError as error:
            channel.write(writer, Broken(epoch=epoch, error=error))
        except Exception as error:
            broken = InfraError(f"{type(error).__name__}: {error}", reason="WEIGHTS_GROUP_BROKEN")
            channel.write(writer, Broken(epoch=epoch, error=broken))

    async def _join(self, writer: asyncio.StreamWriter) -> None:
        assert self._landing is not None, "_begin made it"
        await self._landing.join()
        channel.write(writer, Joined(epoch=self._epoch))

    async def _receive(self, writer: asyncio.StreamWriter) -> None:
        """Take all buckets; two buffers are enough, as a digest is awaited before the next."""
        landing, epoch = self._landing, self._epoch
        assert landing is not None, "_begin made it"
        digesting = asyncio.ensure_future(asyncio.sleep(0))
        try:
            for bucket in self._buckets:
                await landing.receive(bucket)
                channel.write(writer, Arrived(epoch=epoch, index=bucket.index))
                await digesting
                digesting = asyncio.ensure_future(self._digest(landing, bucket, writer))
            await digesting
        finally:
            digesting.cancel()

    async def _digest(self, landing: Landing, bucket: Bucket, writer: asyncio.StreamWriter) -> None:
        epoch, index = self._epoch, bucket.index
        try:
            report = Digested(epoch=epoch, index=index, digest=await landing.digest(bucket))
        except Exception as error:
            report = Digested(epoch=epoch, index=index, error=str(error) or type(error).__name__)
        channel.write(writer, report)

    async def _drop(self, *, abort: bool) -> None:
        if self._work is not None:
            self._work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._work
            self._work = None
        if self._landing is not None:
            self._landing.close(abort=abort)
            self._landing = None
            if self._device != "cpu":
                import torch

                # What torch keeps for later counts as taken where vLLM looks.
                torch.cuda.empty_cache()

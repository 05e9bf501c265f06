"""vLLM's workers as the receiving end of a push: they are the members of the group.

The service's process has no place in a NCCL group: it would need a GPU of its own, or room beside
vLLM's share of one. So each worker joins, from a thread that does not hold up its steps, and says
over its socket what arrives. Ranks: worker r of a replica has the replica's rank plus r.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from quartet.errors import DeadlineError, InfraError, QuartetError
from quartet.types import PrepareWeightsRequest, PushBackend
from quartet.weights.landing import NamedTensors, check_space
from quartet.weights.manifest import Bucket, plan_buckets, total_bytes
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
    Report,
    Room,
)
from quartet_rollout.engines.vllm.handover import SharedMemory, layout_bytes

if TYPE_CHECKING:
    import torch

R = TypeVar("R", bound=Room | Joined | Arrived | Digested)

CONNECT_SECONDS = 60.0
"""How long workers get to connect once vLLM has told them to."""

_GRACE = 5.0
"""Seconds beyond the group's own timeout, for an answer to come back."""

_DEVICE_MARGIN = 1 << 30
"""Bytes of a GPU that a staging area leaves free: NCCL and the reload need some."""


class Crew:
    """Connections to all workers of one engine. Belongs to one event loop."""

    def __init__(self, size: int, backends: Collection[PushBackend]) -> None:
        self.size = size
        self.backends = backends
        self._is_closing = False
        self._broken = asyncio.Event()
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._complete = asyncio.Event()
        self._landing: CrewLanding | None = None

    def landing(self, request: PrepareWeightsRequest) -> CrewLanding:
        """The receiving end of a push."""
        return CrewLanding(self, request)

    def listen(self, landing: CrewLanding) -> None:
        """Give what the workers say to this push from here on."""
        self._landing = landing

    def order(self, rank: int, order: Order) -> None:
        """Tell one worker."""
        if (writer := self._writers.get(rank)) is not None:
            channel.write(writer, order)

    def order_all(self, order: Order) -> None:
        """Tell all workers."""
        for rank in range(self.size):
            self.order(rank, order)

    @property
    def is_broken(self) -> bool:
        """True once a worker is gone."""
        return self._broken.is_set()

    async def broken(self) -> InfraError:
        """Wait until a worker is gone, or no longer listens: it will take no push again."""
        await self._broken.wait()
        return InfraError("a worker of vLLM is gone", reason="ENGINE_DEAD")

    async def complete(self) -> None:
        """Wait until all workers are there."""
        await self._complete.wait()

    def close(self) -> None:
        """Hang up."""
        self._is_closing = True
        for writer in self._writers.values():
            writer.close()

    async def welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Listen to one worker for as long as it lives."""
        hello = await channel.read(reader)
        if not isinstance(hello, Hello):
            writer.close()
            return
        self._writers[hello.rank] = writer
        if len(self._writers) == self.size:
            self._complete.set()
        while isinstance(report := await channel.read(reader), Report):
            if self._landing is not None:
                self._landing.take(hello.rank, report)
        del self._writers[hello.rank]
        if not self._is_closing:
            self._broken.set()
        if self._landing is not None:
            self._landing.fail(_gone(hello.rank))
        writer.close()


class CrewLanding:
    """One push into the workers; see `quartet.weights.landing.Landing`."""

    def __init__(self, crew: Crew, request: PrepareWeightsRequest) -> None:
        self._crew = crew
        self._request = request
        self._epoch = request.epoch
        self._buckets = plan_buckets(request.manifest)
        self._rounds: dict[tuple[type, int], _Round] = {}
        self._error: Exception | None = None
        self._memory: SharedMemory | None = None
        self._is_receiving = False
        self._is_closed = False

    @property
    def num_ranks(self) -> int:
        """One a worker."""
        return self._crew.size

    async def join(self) -> None:
        """Have all workers join."""
        if self._crew.is_broken:
            raise InfraError("a worker of vLLM is gone", reason="ENGINE_DEAD")
        self._crew.listen(self)
        limit = self._request.group_timeout + _GRACE
        try:
            async with asyncio.timeout(limit):
                path = await self._shared_path()
                for rank in range(self._crew.size):
                    place = replace(self._request, rank=self._request.rank + rank)
                    self._crew.order(rank, Join(request=place, shared_path=path))
                await self._all(Joined, 0)
        except TimeoutError as error:
            if isinstance(error, QuartetError):
                raise
            raise DeadlineError(
                f"vLLM's workers did not join in {limit:g} s", reason="WEIGHTS_GROUP_TIMEOUT"
            ) from error

    async def receive(self, bucket: Bucket) -> None:
        """Wait until it has arrived at all workers."""
        if not self._is_receiving:
            self._is_receiving = True
            self._crew.order_all(Receive(epoch=self._epoch))
        await self._all(Arrived, bucket.index)

    async def digest(self, bucket: Bucket) -> str:
        """The digest that all workers have."""
        reports = await self._all(Digested, bucket.index)
        for rank, report in reports.items():
            if report.error:
                raise InfraError(f"worker {rank}: {report.error}", reason="WEIGHTS_NOT_TAKEN")
        digests = {report.digest for report in reports.values()}
        if len(digests) > 1:
            raise InfraError(
                f"the workers of vLLM have different bytes of bucket {bucket.index}",
                reason="DIGEST_MISMATCH",
            )
        return digests.pop()

    def tensors(self) -> NamedTensors:
        """A mark for the engine: they lie in its workers."""
        return InWorkers(self._epoch)

    def take(self, rank: int, report: Report) -> None:
        """Note what a worker says."""
        if report.epoch != self._epoch:
            return
        if isinstance(report, Broken):
            self.fail(report.error)
        else:
            self._round(type(report), report.index).add(rank, report)

    def fail(self, error: Exception) -> None:
        """Let everybody who waits, or will wait, fail."""
        self._error = self._error or error
        for waiting in self._rounds.values():
            waiting.fail(error)

    def close(self, *, abort: bool) -> None:
        """Have all workers forget it."""
        self._is_closed = True
        self.fail(InfraError("the push was given up", reason="EPOCH_LOST"))
        self._crew.order_all(Drop(epoch=self._epoch, abort=abort))
        if self._memory is not None:
            self._memory.close()

    async def _shared_path(self) -> str:
        """Memory for all workers to share; empty when each of them stages on its device.

        A worker gets all of the bytes and keeps its part: a copy of the model on every device is
        too much for most, while one in host memory serves all workers of a machine.
        """
        if self._request.backend is PushBackend.IPC:
            return ""  # all read it where the sender has it
        needed = total_bytes(self._request.manifest)
        if self._request.backend is PushBackend.NCCL:
            self._crew.order_all(AskRoom(epoch=self._epoch))
            rooms = await self._all(Room, 0)
            if min(room.free_bytes for room in rooms.values()) > needed + _DEVICE_MARGIN:
                return ""
        elif self._crew.size == 1:
            check_space(needed, "cpu")
            return ""
        size = layout_bytes(self._buckets)
        check_space(size, "cpu")
        memory = await asyncio.to_thread(SharedMemory, size)
        if self._is_closed:
            memory.close()
            raise InfraError("the push was given up", reason="EPOCH_LOST")
        self._memory = memory
        return memory.path

    async def _all(self, kind: type[R], index: int) -> dict[int, R]:
        """One report of that kind from every worker."""
        return await self._round(kind, index).complete

    def _round(self, kind: type[Report], index: int) -> _Round:
        key = kind, index
        if key not in self._rounds:
            self._rounds[key] = _Round(self._crew.size)
            if self._error is not None:
                self._rounds[key].fail(self._error)
        return self._rounds[key]


class InWorkers:
    """Tensors of a push that lie in vLLM's workers: in this process there are none."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """None of them lies here."""
        return iter(())


class _Round:
    """One report of one kind from each worker."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._reports: dict[int, Report] = {}
        self.complete: asyncio.Future[dict[int, Any]] = asyncio.get_running_loop().create_future()
        # Nobody may be waiting when it fails.
        self.complete.add_done_callback(lambda done: done.cancelled() or done.exception())

    def add(self, rank: int, report: Report) -> None:
        self._reports[rank] = report
        if len(self._reports) == self._size and not self.complete.done():
            self.complete.set_result(self._reports)

    def fail(self, error: Exception) -> None:
        if not self.complete.done():
            self.complete.set_exception(error)


async def assemble(
    size: int,
    tell: Callable[[str], Awaitable[object]],
    *,
    backends: Collection[PushBackend],
) -> Crew:
    """Have all workers of an engine connect.

    Args:
        size: How many there are.
        tell: Gives them the path of a socket.
        backends: Of the pushes that they take.

    Raises:
        InfraError: They did not come.
    """
    crew = Crew(size, backends)
    with tempfile.TemporaryDirectory(prefix="quartet-crew-") as folder:
        path = f"{folder}/socket"
        server = await asyncio.start_unix_server(crew.welcome, path)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await tell(path)
                await crew.complete()
        except TimeoutError as error:
            raise InfraError(
                f"vLLM's workers did not connect in {CONNECT_SECONDS:g} s",
                reason="ENGINE_FAILED",
                remedy="all workers of an engine must run on the machine of its service",
            ) from error
        finally:
            server.close()
    return crew


def _gone(rank: int) -> InfraError:
    return InfraError(f"worker {rank} of vLLM is gone", reason="ENGINE_DEAD")

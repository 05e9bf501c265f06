"""The sending side of a push: one sender, several replicas, four calls.

    Prepare   all replicas check the manifest and join a group; who refuses or is late is left out
    Receive   all replicas say READY; the sender broadcasts bucket after bucket
    Commit    each replica swaps, if it has every byte as sent
    Abort     whatever failed before: the old version serves on

The sender waits for nothing longer than `group_timeout`, and a replica's death is known from its
gRPC stream long before gloo would tell.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import tempfile
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path

from quartet.errors import ConfigError, DeadlineError, QuartetError
from quartet.types import PushBackend, PushResult, Rendezvous, WeightManifest
from quartet.types.requests import CommitWeightsRequest, ReceiveWeightsRequest
from quartet.weights.assemble import PushPlan, abort_all, ask_ranks, assemble_group
from quartet.weights.clock import PushClock
from quartet.weights.ipc import IpcTransport, Retained, make_segment
from quartet.weights.lane import SendLane, TensorSource
from quartet.weights.manifest import total_bytes
from quartet.weights.member import Member, PushTarget
from quartet.weights.transport import FileTransport, Transport
from quartet.weights.worker import Worker

log = logging.getLogger(__name__)

_RETAINED = Retained()
"""Memory of GPUs that replicas may still read, of all pushes of this process."""


async def push_weights(
    *,
    manifest: WeightManifest,
    tensors: TensorSource,
    replicas: Sequence[PushTarget],
    epoch: int,
    policy_version: int,
    backend: PushBackend,
    group_timeout: float = 30.0,
    commit_timeout: float = 120.0,
    folder: str = "",
    executor: Executor | None = None,
    device: str = "cuda",
    clock: PushClock | None = None,
) -> PushResult:
    """Bring weights to all replicas that will take them.

    Args:
        manifest: What is sent, in order, with the bucket size.
        tensors: Yields every bucket's flat buffer in order. Called at most once, and then drained
            to its end whatever happens; also called when all replicas refuse.
        replicas: Clients of the rollout services.
        epoch: Higher than any before. A replica that does not join costs one more: an attempt
            with r refusals uses epoch to epoch + r, so take a clock's nanoseconds, not a counter.
        policy_version: Version that the weights get.
        backend: gloo, nccl, ipc or file.
        group_timeout: Seconds: the longest wait for one operation (join, READY, one bucket).
        commit_timeout: Seconds that an engine may take to swap.
        folder: For backend file: a folder on a disk that all replicas see.
        executor: Runs the source, on the thread that owns the model; None takes a new thread.
        device: Where the weights lie: the buffers of nccl, the memory of ipc.
        clock: Where the source notes how long gathers and packing take.

    Returns:
        What became of each replica, in the order of `replicas`. Failures of replicas are told
        here, not raised.

    Raises:
        ConfigError: Backend file has no folder that it can write to.
        InfraError: Backend ipc has no room for the weights.
        Exception: Whatever the source raises, after all replicas were told to give up.
    """
    plan = PushPlan(
        manifest=manifest,
        policy_version=policy_version,
        backend=backend,
        group_timeout=group_timeout,
        device=device,
    )
    push = _Push(plan, replicas, tensors, executor, commit_timeout, clock or PushClock())
    if backend is PushBackend.FILE:
        return await push.by_files(epoch, folder)
    if backend is PushBackend.IPC:
        return await push.by_ipc(epoch)
    return await push.by_group(epoch)


class _Push:
    """One push, from the first call to the result."""

    def __init__(
        self,
        plan: PushPlan,
        replicas: Sequence[PushTarget],
        source: TensorSource,
        executor: Executor | None,
        commit_timeout: float,
        clock: PushClock,
    ) -> None:
        self._plan = plan
        self._members = [Member(target) for target in replicas]
        self._source = source
        self._executor = executor
        self._commit_timeout = commit_timeout
        self._clock = clock
        self._readers: set[str] = set()
        """Addresses of replicas that may have memory of this push open."""

    async def by_group(self, epoch: int) -> PushResult:
        """Assemble, broadcast, commit."""
        begun = time.monotonic()
        try:
            lane, epoch = await assemble_group(self._members, self._plan, epoch=epoch)
        except BaseException:
            for member in self._members:
                await member.stop_watching()
                await member.end_aborts()
            raise
        prepared = time.monotonic()
        try:
            await self._drain(lane)
            await self._end_receive(lane, timeout=self._plan.group_timeout)
        except BaseException:
            await self._give_up(lane, epoch)
            raise
        finally:
            lane.close()
        return await self._commit(lane, epoch, begun, prepared)

    async def by_files(self, epoch: int, folder: str) -> PushResult:
        """Prepare, write all files, let the replicas read them, commit."""
        begun = time.monotonic()
        if not folder:
            raise ConfigError(
                "push.backend file needs a folder",
                field="push.folder",
                remedy="give a folder on a disk that the learner and all replicas see",
            )
        place = await asyncio.to_thread(_make_folder, folder, epoch)
        transport = FileTransport(place, owner=True)
        return await self._each_for_itself(epoch, begun, Rendezvous(folder=place), transport)

    async def by_ipc(self, epoch: int) -> PushResult:
        """The same through a block of memory that all replicas have open until the end."""
        begun = time.monotonic()
        plan = self._plan
        await asyncio.gather(*(ask_ranks(m, plan) for m in self._members))
        segment = await asyncio.to_thread(make_segment, plan.buckets, plan.device)

        def let_go() -> None:
            committed = {m.target.address for m in self._members if m.committed}
            _RETAINED.hold(segment, self._readers - committed)

        transport = IpcTransport(segment, plan.buckets, let_go=let_go)
        return await self._each_for_itself(epoch, begun, Rendezvous(ipc=segment.handle), transport)

    async def _each_for_itself(
        self, epoch: int, begun: float, rendezvous: Rendezvous, transport: Transport
    ) -> PushResult:
        """Prepare, write all, let each replica read when it will, commit."""
        in_use = False
        try:
            await self._invite(epoch, rendezvous)
            in_use = bool(self._living())
        finally:
            if not in_use:  # whoever refuses needs nothing to be written
                transport.close(abort=True)
        prepared = time.monotonic()
        lane = SendLane(
            self._plan.buckets, transport if in_use else None, timeout=self._plan.group_timeout
        )
        try:
            await self._drain(lane)
            self._begin_reading(lane, epoch)
            await self._end_reading(lane)
            return await self._commit(lane, epoch, begun, prepared)
        except BaseException:
            await self._give_up(lane, epoch)
            raise
        finally:
            lane.close()

    async def _invite(self, epoch: int, rendezvous: Rendezvous) -> None:
        living = self._living()
        ends = list(itertools.accumulate((m.num_ranks for m in living), initial=1))

        async def prepare(member: Member, rank: int) -> None:
            request = self._plan.prepare_request(
                epoch=epoch,
                request_id=f"push-{epoch}-{uuid.uuid4().hex}",
                rendezvous=rendezvous,
                rank=rank,
                world_size=ends[-1],
            )
            address = member.target.address
            self._readers.add(address)
            try:
                await member.prepare(request, timeout=self._plan.group_timeout)
                quiet.discard(address)
            except Exception as error:
                member.fail("prepare", error)
                if not _may_have_joined(error):
                    self._readers.discard(address)
                    quiet.discard(address)

        asked = {m.target.address for m in self._members}
        quiet = set(asked)
        await asyncio.gather(*(prepare(m, r) for m, r in zip(living, ends, strict=False)))
        _RETAINED.release(asked=asked, answered=asked - quiet)

    async def _drain(self, lane: SendLane) -> None:
        """Run the source to its end on its own thread; a cancelled push still does."""
        lane.clock = self._clock
        if self._executor is not None:
            job = self._executor.submit(lane.pump, self._source)
        else:
            worker = Worker("quartet-push-source")
            job = worker.submit(lane.pump, self._source)
            worker.close()
        draining = asyncio.wrap_future(job)
        try:
            await asyncio.shield(draining)
        except asyncio.CancelledError:
            lane.break_off("the push was cancelled")
            await asyncio.wait({draining})
            raise

    def _begin_reading(self, lane: SendLane, epoch: int) -> None:
        """Let all replicas read, each for itself: the loss of one concerns no other."""
        if lane.broken:
            return
        request = ReceiveWeightsRequest(epoch=epoch, policy_version=self._plan.policy_version)
        for member in self._living():
            member.begin_receive(
                request, lane, timeout=self._plan.receive_timeout, on_loss=log.warning
            )

    async def _end_reading(self, lane: SendLane) -> None:
        """Wait for those that read, each as long as it gets on."""
        if not lane.broken:
            timeout = self._plan.group_timeout
            await asyncio.gather(*(m.end_reading(timeout=timeout) for m in self._living()))
        await self._end_receive(lane, timeout=0)

    async def _end_receive(self, lane: SendLane, *, timeout: float) -> None:
        """Wait for DONE of those that are still with us."""
        if lane.broken:
            for member in self._living():
                member.fail(
                    "receive",
                    f"the transfer broke: {lane.error} "
                    f"(this replica had taken {member.buckets_taken} buckets)",
                )
        else:
            await asyncio.gather(*(m.end_receive(timeout=timeout) for m in self._living()))
        for member in self._members:
            await member.stop_watching()

    async def _give_up(self, lane: SendLane, epoch: int) -> None:
        lane.break_off("the push was given up")
        for member in self._members:
            await member.stop_watching()
        await abort_all(self._members, epoch, lane.error)

    async def _commit(
        self, lane: SendLane, epoch: int, begun: float, prepared: float
    ) -> PushResult:
        received = time.monotonic()
        digest = "" if lane.broken else lane.hexdigest()
        request = CommitWeightsRequest(
            epoch=epoch, policy_version=self._plan.policy_version, digest=digest
        )
        living = self._living()
        await asyncio.gather(*(m.commit(request, timeout=self._commit_timeout) for m in living))
        await asyncio.gather(*(m.end_aborts() for m in self._members))
        lost = [m for m in self._members if m.failed and m.failed_phase != "prepare"]
        await abort_all(lost, epoch, lane.error or "the replica left the push")
        result = PushResult(
            replicas=tuple(m.result() for m in self._members),
            prepare_seconds=prepared - begun,
            transfer_seconds=received - lane.started if lane.started else 0.0,
            commit_seconds=time.monotonic() - received,
            gather_seconds=self._clock.seconds("gather"),
            pack_seconds=self._clock.seconds("pack"),
            digest_seconds=self._clock.seconds("digest"),
            broadcast_seconds=self._clock.seconds("broadcast"),
        )
        for member in (m for m in self._members if m.failed):
            log.warning(
                "version %d did not reach %s: %s: %s",
                self._plan.policy_version,
                member.target.address,
                member.failed_phase,
                member.error,
            )
        if lane.broken or not lane.num_sent:
            return result
        return replace(
            result,
            total_bytes=total_bytes(self._plan.manifest),
            num_buckets=lane.num_sent,
            digest=digest,
        )

    def _living(self) -> list[Member]:
        return [m for m in self._members if not m.failed]


def _may_have_joined(error: Exception) -> bool:
    """True where a Prepare failed that may still be obeyed, or finds an older push at its commit.

    Whoever refuses has nothing open, nor has a process that is gone.
    """
    if isinstance(error, QuartetError) and error.info.reason == "COMMIT_UNDER_WAY":
        return True
    return isinstance(error, (TimeoutError, DeadlineError))


def _make_folder(parent: str, epoch: int) -> str:
    try:
        Path(parent).mkdir(parents=True, exist_ok=True)
        return tempfile.mkdtemp(prefix=f"push-{epoch}-", dir=parent)
    except OSError as error:
        raise ConfigError(
            f"push.folder {parent} cannot be written: {error.strerror}",
            field="push.folder",
            value=parent,
            remedy="give a folder on a disk that the learner and all replicas see",
        ) from error

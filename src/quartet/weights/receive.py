"""The receiving side of a push: into a staging area, never into the model that serves.

`WeightInbox` is the state machine of one replica. It knows no engine and no gRPC: an engine says
which tensors it wants and takes them at the commit. Order of calls, all by the sender:

    prepare -> receive -> commit      the new version serves
    any of them fails -> abort        the old version serves on
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quartet.errors import InfraError, QuartetError, RequestError, StateError
from quartet.types import PushBackend, ReceiveEvent, WeightManifest
from quartet.types.requests import (
    AbortWeightsRequest,
    CommitWeightsRequest,
    PrepareWeightsRequest,
    ReceiveWeightsRequest,
)
from quartet.weights.digest import PushDigest, bucket_digest
from quartet.weights.group import (
    connect_store,
    form_group,
    join_address,
    local_address_towards,
)
from quartet.weights.manifest import Bucket, check_manifest, plan_buckets, total_bytes
from quartet.weights.tensors import empty_bucket, unpack_bucket
from quartet.weights.transport import FileTransport, GroupTransport, Transport
from quartet.weights.worker import Worker

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

LoadWeights = Callable[[Iterable[tuple[str, "torch.Tensor"]], int], Awaitable[int]]
"""Takes (named tensors, policy version), swaps them in, says how many completions go on."""

_EVENT_GRACE = 5.0
"""Seconds beyond the transport's own timeout, for the digest of a bucket."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Push:
    """One push under way."""

    request: PrepareWeightsRequest
    buckets: tuple[Bucket, ...]
    worker: Worker
    transport: Transport | None = None
    staged: list[torch.Tensor] = field(default_factory=list)
    """Flat buffers, one a bucket, all made before the first arrives."""
    digest: PushDigest = field(default_factory=PushDigest)
    receiving: bool = False
    complete: bool = False
    committing: bool = False
    """The engine is reading the staged tensors: they must stay until it is done."""

    def close(self, *, abort: bool) -> None:
        self.staged = []
        self.worker.close()
        if self.transport is not None:
            self.transport.close(abort=abort)


class WeightInbox:
    """Takes pushes for one replica, one at a time. Belongs to one event loop."""

    def __init__(
        self, *, wanted: Callable[[], WeightManifest], device: str = "cpu", replica: str = ""
    ) -> None:
        """Make an inbox.

        Args:
            wanted: The tensors that a push must bring.
            device: Where NCCL buffers lie.
            replica: Name of this server, for error messages.
        """
        self._wanted = wanted
        self._device = device
        self._replica = replica
        self._push: _Push | None = None
        self._last_epoch = -1

    @property
    def busy(self) -> bool:
        """True between a prepare and the commit or abort that ends it."""
        return self._push is not None

    async def prepare(self, request: PrepareWeightsRequest) -> None:
        """Check what will come and join the group; returns when all members are there.

        A newer epoch replaces a push that is still open: its sender is gone or has given up.

        Raises:
            RequestError: Names, shapes, dtypes or backend do not fit.
            StateError: The epoch is not newer than the last.
            InfraError: No space, or the group did not form in time.
        """
        if request.epoch <= self._last_epoch:
            raise StateError(
                f"epoch {request.epoch} is not newer than {self._last_epoch}",
                reason="EPOCH_LOST",
                field="epoch",
                value=str(request.epoch),
                replica=self._replica,
            )
        if self._push is not None and self._push.committing:
            raise InfraError(
                f"epoch {self._push.request.epoch} is being committed",
                reason="COMMIT_UNDER_WAY",
                replica=self._replica,
            )
        check_manifest(request.manifest, self._wanted())
        check_space(total_bytes(request.manifest), self._staging_device(request))
        self._end(abort=True)
        self._last_epoch = request.epoch
        push = _Push(
            request=request,
            buckets=plan_buckets(request.manifest),
            worker=Worker(f"quartet-receive-{request.epoch}"),
        )
        self._push = push
        try:
            device = self._staging_device(request)
            push.staged = [empty_bucket(bucket, device) for bucket in push.buckets]
            joined = push.worker.submit(_open_transport, request, self._device)
            transport = await asyncio.wrap_future(joined)
        except BaseException:
            if self._push is push:
                self._end(abort=True)
            raise
        if self._push is not push:  # aborted while the group formed
            transport.close(abort=True)
            raise self._unknown(request.epoch)
        push.transport = transport

    async def receive(self, request: ReceiveWeightsRequest) -> AsyncIterator[ReceiveEvent]:
        """Take part in the broadcast and say what happens: READY, BUCKET..., DONE or FAILED.

        After an error on this side alone the rest is still received: leaving the broadcast would
        hold up every other member of the group.
        """
        push = self._current(request.epoch, request.policy_version)
        if push.transport is None or push.receiving:
            raise StateError(
                f"epoch {request.epoch} is not at the point of receiving",
                reason="WEIGHTS_PHASE_WRONG",
                replica=self._replica,
            )
        push.receiving = True
        try:
            yield ReceiveEvent(event="ready")
            async for event in self._receive_buckets(push, push.transport):
                yield event
        finally:
            # The sender went away in the middle: nothing will complete this push.
            if not push.complete and self._push is push:
                self._end(abort=True)

    async def _receive_buckets(
        self, push: _Push, transport: Transport
    ) -> AsyncIterator[ReceiveEvent]:
        problem = ""
        for bucket, flat in zip(push.buckets, push.staged, strict=True):
            job = push.worker.submit(transport.receive, bucket, flat)
            try:
                async with asyncio.timeout(push.request.group_timeout + _EVENT_GRACE):
                    await asyncio.wrap_future(job)
            except (QuartetError, TimeoutError) as error:  # the group broke: nothing to drain
                message = str(error) or "the group did not answer"
                yield ReceiveEvent(event="failed", bucket_index=bucket.index, error=message)
                return
            try:
                digest = await asyncio.wrap_future(push.worker.submit(bucket_digest, flat))
            except Exception as error:
                problem = problem or f"bucket {bucket.index}: {error}"
                continue
            push.digest.update(digest)
            yield ReceiveEvent(event="bucket", bucket_index=bucket.index, digest=digest)
        if problem:
            yield ReceiveEvent(event="failed", error=problem)
            return
        push.complete = True
        yield ReceiveEvent(event="done", digest=push.digest.hexdigest())

    async def commit(self, request: CommitWeightsRequest, load: LoadWeights) -> int:
        """Hand the staged tensors to the engine if they are whole.

        Returns:
            Completions that were running and go on.

        Raises:
            StateError: No such push, or not all of it arrived.
            InfraError: The digests differ (reason DIGEST_MISMATCH).
        """
        push = self._current(request.epoch, request.policy_version)
        if push.committing:
            raise StateError(
                f"epoch {request.epoch} is being committed already",
                reason="WEIGHTS_PHASE_WRONG",
                replica=self._replica,
            )
        push.committing = True
        try:
            self._verify(push, request.digest)
            return await load(_named(push), request.policy_version)
        finally:
            push.committing = False
            self._end(abort=False)

    def abort(self, request: AbortWeightsRequest) -> None:
        """Forget a push. An unknown epoch is no error: the sender aborts to be sure.

        Too late for a push that is being committed: it goes on to its end.
        """
        if self._push is not None and self._push.request.epoch == request.epoch:
            log.warning("push %d given up: %s", request.epoch, request.cause or "no cause given")
            self._end(abort=True)
        # A prepare that this abort overtook must not open the push after it.
        self._last_epoch = max(self._last_epoch, request.epoch)

    def close(self) -> None:
        """Give up whatever is under way."""
        self._end(abort=True)

    def _verify(self, push: _Push, digest: str) -> None:
        if not push.complete:
            raise StateError(
                "not all buckets arrived",
                reason="WEIGHTS_INCOMPLETE",
                replica=self._replica,
            )
        if push.digest.hexdigest() != digest:
            raise InfraError(
                f"the digest of the weights is {push.digest.hexdigest()} here and {digest} at the "
                "sender",
                reason="DIGEST_MISMATCH",
                replica=self._replica,
            )

    def _current(self, epoch: int, policy_version: int) -> _Push:
        push = self._push
        if push is None or push.request.epoch != epoch:
            raise self._unknown(epoch)
        if push.request.policy_version != policy_version:
            raise StateError(
                f"epoch {epoch} was prepared for version {push.request.policy_version}, "
                f"not {policy_version}",
                reason="WEIGHTS_VERSION_WRONG",
                field="policy_version",
                value=str(policy_version),
                replica=self._replica,
            )
        return push

    def _unknown(self, epoch: int) -> StateError:
        return StateError(
            f"no push of epoch {epoch} is under way",
            reason="EPOCH_LOST",
            field="epoch",
            value=str(epoch),
            remedy="begin with PrepareWeights",
            replica=self._replica,
        )

    def _staging_device(self, request: PrepareWeightsRequest) -> str:
        return self._device if request.backend is PushBackend.NCCL else "cpu"

    def _end(self, *, abort: bool) -> None:
        push = self._push
        if push is not None and not push.committing:
            self._push = None
            push.close(abort=abort)


def check_space(needed: int, device: str) -> None:
    """Raise InfraError when a staging area of `needed` bytes does not fit.

    The old weights keep serving until the commit, so both are there for a moment.
    """
    free = _free_bytes(device)
    if free is not None and needed > free:
        raise InfraError(
            f"no room for {needed / 2**30:.2f} GiB of new weights beside the old: "
            f"{free / 2**30:.2f} GiB are free on {device}",
            reason="WEIGHTS_NO_SPACE",
            remedy="give the engine a smaller share of the memory",
        )


def _free_bytes(device: str) -> int | None:
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


def _open_transport(request: PrepareWeightsRequest, device: str) -> Transport:
    if request.backend is PushBackend.FILE:
        return FileTransport(request.rendezvous.folder, owner=False)
    if request.backend not in (PushBackend.GLOO, PushBackend.NCCL):
        raise RequestError(
            f"push backend {request.backend} is not supported here",
            reason="WEIGHTS_BACKEND_UNSUPPORTED",
            field="backend",
            value=str(request.backend),
            remedy="use gloo, nccl or file",
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


def _named(push: _Push) -> Iterable[tuple[str, torch.Tensor]]:
    for bucket, flat in zip(push.buckets, push.staged, strict=True):
        yield from unpack_bucket(bucket, flat)

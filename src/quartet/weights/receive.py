"""The receiving side of a push: into a staging area, never into the model that serves.

`WeightInbox` is the state machine of one replica. It knows no engine and no gRPC: an engine says
which tensors it wants and takes them at the commit. Order of calls, all by the sender:

    prepare -> receive -> commit      the new version serves
    any of them fails -> abort        the old version serves on
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from quartet.errors import InfraError, QuartetError, StateError
from quartet.types import ReceiveEvent, WeightManifest
from quartet.types.requests import (
    AbortWeightsRequest,
    CommitWeightsRequest,
    PrepareWeightsRequest,
    ReceiveWeightsRequest,
)
from quartet.weights.digest import PushDigest
from quartet.weights.landing import (
    Landing,
    MakeLanding,
    NamedTensors,
    check_room,
    own_landing,
)
from quartet.weights.manifest import Bucket, check_manifest, plan_buckets

log = logging.getLogger(__name__)

LoadWeights = Callable[[NamedTensors, int], Awaitable[int]]
"""Takes (named tensors, policy version), swaps them in, says how many completions go on."""

_EVENT_GRACE = 5.0
"""Seconds beyond the transport's own timeout, for the digest of a bucket."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Push:
    """One push under way."""

    request: PrepareWeightsRequest
    buckets: tuple[Bucket, ...]
    landing: Landing
    joined: bool = False
    digest: PushDigest = field(default_factory=PushDigest)
    receiving: bool = False
    complete: bool = False
    committing: bool = False
    """The engine is reading the staged tensors: they must stay until it is done."""


class WeightInbox:
    """Takes pushes for one replica, one at a time. Belongs to one event loop."""

    def __init__(
        self,
        *,
        wanted: Callable[[], WeightManifest],
        device: str = "cpu",
        replica: str = "",
        landing: MakeLanding | None = None,
    ) -> None:
        """Make an inbox.

        Args:
            wanted: The tensors that a push must bring.
            device: Where NCCL buffers lie.
            replica: Name of this server, for error messages.
            landing: Makes the receiving end of each push; None receives in this process.
        """
        self._wanted = wanted
        self._land = landing or (lambda request: own_landing(request, device))
        self._replica = replica
        self._push: _Push | None = None
        self._last_epoch = -1

    @property
    def busy(self) -> bool:
        """True between a prepare and the commit or abort that ends it."""
        return self._push is not None

    async def prepare(self, request: PrepareWeightsRequest) -> int:
        """Check what will come and join the group; returns when all members are there.

        A newer epoch replaces a push that is still open: its sender is gone or has given up.

        Returns:
            Ranks that this replica holds in the group.

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
        landing = self._land(request)
        check_room(request, landing)
        self._end(abort=True)
        self._last_epoch = request.epoch
        push = _Push(request=request, buckets=plan_buckets(request.manifest), landing=landing)
        self._push = push
        try:
            await landing.join()
        except BaseException:
            if self._push is push:
                self._end(abort=True)
            raise
        if self._push is not push:  # aborted while the group formed
            raise self._unknown(request.epoch)
        push.joined = True
        return landing.num_ranks

    async def receive(self, request: ReceiveWeightsRequest) -> AsyncIterator[ReceiveEvent]:
        """Take part in the broadcast and say what happens: READY, BUCKET..., DONE or FAILED.

        After an error on this side alone the rest is still received: leaving the broadcast would
        hold up every other member of the group.
        """
        push = self._current(request.epoch, request.policy_version)
        if not push.joined or push.receiving:
            raise StateError(
                f"epoch {request.epoch} is not at the point of receiving",
                reason="WEIGHTS_PHASE_WRONG",
                replica=self._replica,
            )
        push.receiving = True
        try:
            yield ReceiveEvent(event="ready")
            async for event in self._receive_buckets(push):
                yield event
        finally:
            # The sender went away in the middle: nothing will complete this push.
            if not push.complete and self._push is push:
                self._end(abort=True)

    async def _receive_buckets(self, push: _Push) -> AsyncIterator[ReceiveEvent]:
        """Take all buckets; the digest of one is computed while the next arrives."""
        landing, limit = push.landing, push.request.group_timeout + _EVENT_GRACE
        problem = ""
        arriving = _arriving(landing, push.buckets[0])
        try:
            for bucket in push.buckets:
                try:
                    async with asyncio.timeout(limit):
                        await arriving
                except (QuartetError, TimeoutError) as error:  # the group broke: nothing to drain
                    message = str(error) or "the group did not answer"
                    yield ReceiveEvent(event="failed", bucket_index=bucket.index, error=message)
                    return
                if bucket.index + 1 < len(push.buckets):
                    arriving = _arriving(landing, push.buckets[bucket.index + 1])
                try:
                    digest = await landing.digest(bucket)
                except Exception as error:
                    problem = problem or f"bucket {bucket.index}: {error}"
                    continue
                push.digest.update(digest)
                yield ReceiveEvent(event="bucket", bucket_index=bucket.index, digest=digest)
        finally:
            arriving.cancel()
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
            return await load(push.landing.tensors(), request.policy_version)
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

    def _end(self, *, abort: bool) -> None:
        push = self._push
        if push is not None and not push.committing:
            self._push = None
            push.landing.close(abort=abort)


def _arriving(landing: Landing, bucket: Bucket) -> asyncio.Task[None]:
    """Begin to receive a bucket. How it failed is not told where nobody waits for it any more."""
    task = asyncio.ensure_future(landing.receive(bucket))
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task

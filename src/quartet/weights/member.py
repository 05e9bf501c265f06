"""One replica in one push, as the sender sees it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from quartet.errors import InfraError
from quartet.types import ReceiveEvent, ReplicaPushResult, RolloutInfo
from quartet.types.requests import (
    AbortWeightsRequest,
    AbortWeightsResult,
    CommitWeightsRequest,
    CommitWeightsResult,
    PrepareWeightsRequest,
    PrepareWeightsResult,
    ReceiveWeightsRequest,
)
from quartet.weights.lane import SendLane

log = logging.getLogger(__name__)


class PushTarget(Protocol):
    """What a sender needs of a replica; `quartet.clients.RolloutClient` has it."""

    @property
    def address(self) -> str:
        """Where the replica listens."""
        ...

    async def get_info(self, *, timeout: float | None = None) -> RolloutInfo:
        """What it is, and how many ranks it takes in a group."""
        ...

    async def prepare_weights(
        self, request: PrepareWeightsRequest, *, timeout: float | None = None
    ) -> PrepareWeightsResult:
        """First phase."""
        ...

    def receive_weights(
        self, request: ReceiveWeightsRequest, *, timeout: float | None = None
    ) -> AsyncIterator[ReceiveEvent]:
        """Second phase. Raises as soon as the replica is gone."""
        ...

    async def commit_weights(
        self, request: CommitWeightsRequest, *, timeout: float | None = None
    ) -> CommitWeightsResult:
        """Third phase."""
        ...

    async def abort_weights(
        self, request: AbortWeightsRequest, *, timeout: float | None = None
    ) -> AbortWeightsResult:
        """Give up."""
        ...


class Member:
    """Follows one replica through the phases and keeps the first thing that went wrong."""

    def __init__(self, target: PushTarget) -> None:
        self.target = target
        self.replica = ""
        self.failed_phase = ""
        self.error = ""
        self.num_ranks = 1
        self.committed = False
        self.buckets_taken = 0
        self._watch: asyncio.Task[None] | None = None
        self._aborts: list[asyncio.Task[None]] = []
        self._ready: asyncio.Future[None] | None = None
        self._heard = 0.0
        """When its last event came, by time.monotonic()."""

    @property
    def failed(self) -> bool:
        """True once this replica is out of the push."""
        return bool(self.failed_phase)

    def fail(self, phase: str, error: object) -> None:
        """Leave the push. Only the first failure counts."""
        if not self.failed:
            self.failed_phase = phase
            self.error = str(error) or type(error).__name__

    def result(self) -> ReplicaPushResult:
        """What became of it."""
        return ReplicaPushResult(
            address=self.target.address,
            replica=self.replica,
            committed=self.committed,
            failed_phase=self.failed_phase,
            error=self.error,
        )

    async def prepare(self, request: PrepareWeightsRequest, *, timeout: float) -> None:
        """Ask it to join."""
        answer = await self.target.prepare_weights(request, timeout=timeout)
        self.replica = answer.replica

    def begin_receive(
        self,
        request: ReceiveWeightsRequest,
        lane: SendLane,
        *,
        timeout: float,
        on_loss: Callable[[str], None],
    ) -> asyncio.Future[None]:
        """Open its stream of events; the future is done at READY, or has why that never came.

        Args:
            request: Which push.
            lane: Knows the digests of what was sent.
            timeout: Seconds for the whole stream.
            on_loss: Called at once when the replica is gone before its last event.
        """
        self._ready = asyncio.get_running_loop().create_future()
        self._heard = time.monotonic()
        self._watch = asyncio.create_task(self._follow(request, lane, timeout, on_loss))
        return self._ready

    async def end_receive(self, *, timeout: float) -> None:
        """Wait for DONE or FAILED, but not long."""
        if self._watch is None:
            return
        done, _ = await asyncio.wait({self._watch}, timeout=timeout)
        if not done:
            self.fail("receive", f"no DONE within {timeout:g} s of the last bucket")
        await self.stop_watching()

    async def end_reading(self, *, timeout: float) -> None:
        """Wait for DONE or FAILED as long as it says, every `timeout` seconds, that it gets on."""
        while self._watch is not None and not self._watch.done():
            left = self._heard + timeout - time.monotonic()
            if left <= 0:
                self.fail("receive", f"bucket {self.buckets_taken} was not read in {timeout:g} s")
                break
            await asyncio.wait({self._watch}, timeout=left)
        await self.stop_watching()

    async def stop_watching(self) -> None:
        """Close the stream, which cancels the call."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})
            self._watch = None

    async def commit(self, request: CommitWeightsRequest, *, timeout: float) -> None:
        """Ask it to swap."""
        try:
            async with asyncio.timeout(timeout):
                await self.target.commit_weights(request, timeout=timeout)
        except TimeoutError:
            self.fail("commit", f"no answer within {timeout:g} s")
        except Exception as error:
            self.fail("commit", error)
        else:
            self.committed = True

    def begin_abort(self, request: AbortWeightsRequest, *, timeout: float) -> None:
        """The same as `abort`, and go on with another epoch meanwhile."""
        self._aborts.append(asyncio.create_task(self.abort(request, timeout=timeout)))

    async def end_aborts(self) -> None:
        """Wait for all that was begun."""
        await asyncio.gather(*self._aborts)

    async def abort(self, request: AbortWeightsRequest, *, timeout: float) -> None:
        """Tell it that nothing comes. One that does not hear it finds out by its own timeout."""
        try:
            async with asyncio.timeout(timeout):
                await self.target.abort_weights(request, timeout=timeout)
        except Exception as error:
            log.warning(
                "%s did not hear that epoch %d is over: %s",
                self.target.address,
                request.epoch,
                str(error) or type(error).__name__,
            )

    async def _follow(
        self,
        request: ReceiveWeightsRequest,
        lane: SendLane,
        timeout: float,
        on_loss: Callable[[str], None],
    ) -> None:
        finished = False
        try:
            async for event in self.target.receive_weights(request, timeout=timeout):
                finished = await self._take(event, lane)
            if not finished:
                raise InfraError("the stream of events ended before DONE")
        except Exception as error:
            self.fail("receive", error)
            # A death is known at once here; inside a gloo broadcast it is not.
            on_loss(f"{self.target.address}: {error}")
        finally:
            self._settle_ready()

    async def _take(self, event: ReceiveEvent, lane: SendLane) -> bool:
        """Note one event; True when it was the last."""
        self._heard = time.monotonic()
        if event.event == "ready":
            assert self._ready is not None, "begin_receive made it"
            if not self._ready.done():
                self._ready.set_result(None)
        elif event.event == "bucket":
            self.buckets_taken += 1
            digest = asyncio.wrap_future(lane.digest_of(event.bucket_index))
            # Shielded: whoever stops to follow this replica must not stop the digest for others.
            if event.digest != await asyncio.shield(digest):
                self.fail("receive", f"the digest of bucket {event.bucket_index} differs")
        elif event.event == "failed":
            self.fail("receive", event.error)
            return True
        elif event.event == "done":
            if event.digest != lane.hexdigest():
                self.fail("receive", "the digest of all buckets differs")
            return True
        return False

    def _settle_ready(self) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(InfraError(self.error or "the receive ended before READY"))
            self._ready.exception()  # seen: nobody may be waiting any more

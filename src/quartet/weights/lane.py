"""The blocking half of a sender: drains the source of tensors and sends what it yields.

Runs on the thread that owns the model. Under ZeRO-3 every item of the source is a gather that all
learner ranks take part in, so the source is drained to its end whatever happens to the sending:
leaving it in the middle would leave the other ranks alone in a collective.

Three threads work at the same time: the owner gathers and packs bucket k + 1, while bucket k is
broadcast on one thread and digested on another.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeAlias

from quartet.errors import FatalError, InfraError
from quartet.weights.clock import PushClock
from quartet.weights.digest import PushDigest, bucket_digest
from quartet.weights.manifest import Bucket
from quartet.weights.tensors import dtype_name
from quartet.weights.transport import Transport
from quartet.weights.worker import Worker

if TYPE_CHECKING:
    import torch

TensorSource: TypeAlias = "Callable[[], Iterator[tuple[int, torch.Tensor]]]"
"""Yields (bucket index, flat buffer) for every bucket of the plan, in order.

A buffer stays as it is until the next but one is asked for: while one is sent, the next is filled.
After a failed send it may be read still, but nobody commits what was read.
"""


class _Parcel:
    """One bucket on its way."""

    def __init__(self, bucket: Bucket, flat: torch.Tensor) -> None:
        self.bucket = bucket
        self.flat = flat
        self.begun = 0.0
        """When its broadcast began, by time.monotonic(); 0 before."""
        self.sent: Future[None] = Future()
        self.digest: Future[str] = Future()


class SendLane:
    """Sends buckets, one after the other, and never waits longer than `timeout` for one.

    Without a transport it drains the source and sends nothing: all replicas have refused.

    Attributes:
        clock: Where the time goes; another may take its place before anything is sent.
        num_sent: Buckets that were given to the transport.
        started: When the first bucket left, by time.monotonic(); 0 before.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        transport: Transport | None,
        *,
        timeout: float,
    ) -> None:
        self._buckets = buckets
        self._timeout = timeout
        self._transport = transport
        self._sender = Worker("quartet-send")
        self._digester = Worker("quartet-send-digest")
        self._digests: list[Future[str]] = []
        self._broken: Future[None] = Future()
        self._lock = threading.Lock()
        self.clock = PushClock()
        self.error = ""
        self.started = 0.0

    def break_off(self, why: str) -> None:
        """Send nothing more, from any thread; a send under way is left behind at once."""
        with self._lock:
            if not self._broken.done():
                self.error = why
                self._broken.set_result(None)

    def close(self) -> None:
        """Let go of transport and threads; a broken lane gives up what is under way."""
        self._sender.close()
        self._digester.close()
        if self._transport is not None:
            self._transport.close(abort=self.broken)

    @property
    def broken(self) -> bool:
        """True once nothing more is sent."""
        return self._broken.done()

    @property
    def num_sent(self) -> int:
        """Buckets that have been on their way."""
        return len(self._digests)

    def digest_of(self, index: int) -> Future[str]:
        """Digest of a bucket; known at the latest a moment after its bytes have left.

        Raises:
            InfraError: This bucket has not been sent.
        """
        if not 0 <= index < len(self._digests):
            raise InfraError(f"bucket {index} has not been sent")
        return self._digests[index]

    def hexdigest(self) -> str:
        """Digest over all buckets. Waits for those that are being computed."""
        total = PushDigest()
        for digest in self._digests:
            total.update(digest.result())
        return total.hexdigest()

    def pump(self, source: TensorSource) -> None:
        """Drain `source` to its end. Blocks; what went wrong with the sending is in `error`.

        Raises:
            FatalError: The source did not follow the plan.
            Exception: Whatever the source raises.
        """
        count = 0
        under_way: deque[_Parcel] = deque()
        try:
            for index, flat in source():
                self._check(count, index, flat)
                count += 1
                if self._transport is not None and not self.broken:
                    under_way.append(self._begin(self._buckets[index], flat, self._transport))
                    self._finish(under_way, leave=1)
            if count != len(self._buckets):
                raise FatalError(f"the source gave {count} of {len(self._buckets)} buckets")
            self._finish(under_way, leave=0)
        except BaseException as error:
            self.break_off(f"the source of the weights failed: {error}")
            raise

    def _begin(self, bucket: Bucket, flat: torch.Tensor, transport: Transport) -> _Parcel:
        """Hand one bucket to the two threads."""
        _settle(flat)
        parcel = _Parcel(bucket, flat)
        # Before its bytes leave: an answer to them asks for it.
        parcel.digest = self._digester.submit(self._digest, flat)
        self._digests.append(parcel.digest)
        parcel.sent = self._sender.submit(self._send, parcel, transport)
        return parcel

    def _finish(self, under_way: deque[_Parcel], *, leave: int) -> None:
        """Wait until at most `leave` buckets are on their way, or the lane is broken."""
        while len(under_way) > leave and not self.broken:
            parcel = under_way.popleft()
            name = f"bucket {parcel.bucket.index}"
            left = self._timeout
            if parcel.begun:  # its deadline has run since then, whatever was done meanwhile
                left = max(0.0, parcel.begun + self._timeout - time.monotonic())
            self._await(parcel.sent, left, name)
            self._await(parcel.digest, self._timeout, f"the digest of {name}")

    def _await(self, job: Future[Any], left: float, name: str) -> None:
        """Wait `left` seconds for one of a bucket's jobs; break off when it is late or fails."""
        done, _ = concurrent.futures.wait(
            {job, self._broken}, timeout=left, return_when=concurrent.futures.FIRST_COMPLETED
        )
        if not done:
            self.break_off(f"{name} was not taken in {self._timeout:g} s")
        elif job in done and (error := job.exception()) is not None:
            self.break_off(f"{name}: {error}")

    def _send(self, parcel: _Parcel, transport: Transport) -> None:
        """Broadcast one bucket, on the thread for it."""
        if self.broken:
            return
        parcel.begun = time.monotonic()
        self.started = self.started or parcel.begun
        with self.clock.measure("broadcast"), _own_stream(parcel.flat):
            transport.send(parcel.bucket, parcel.flat)

    def _digest(self, flat: torch.Tensor) -> str:
        with self.clock.measure("digest"), _own_stream(flat):
            return bucket_digest(flat)

    def _check(self, count: int, index: int, flat: torch.Tensor) -> None:
        bucket = self._buckets[index] if index == count and index < len(self._buckets) else None
        if bucket is None:
            raise FatalError(f"the source gave bucket {index} where {count} was due")
        if flat.numel() != bucket.numel or dtype_name(flat.dtype) != bucket.dtype:
            raise FatalError(
                f"bucket {index} is {flat.numel()} {dtype_name(flat.dtype)}, the plan says "
                f"{bucket.numel} {bucket.dtype}"
            )


def _settle(flat: torch.Tensor) -> None:
    """Wait until what fills a buffer on a GPU is done: other threads' streams do not know of it."""
    if flat.is_cuda:
        import torch

        torch.cuda.current_stream(flat.device).synchronize()


@contextlib.contextmanager
def _own_stream(flat: torch.Tensor) -> Iterator[None]:
    """On a GPU, do not queue behind the next bucket's gather."""
    if not flat.is_cuda:
        yield
        return
    import torch

    with torch.cuda.stream(torch.cuda.Stream(flat.device)):
        yield

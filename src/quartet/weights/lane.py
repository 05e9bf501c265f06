"""The blocking half of a sender: drains the source of tensors and sends what it yields.

Runs on the thread that owns the model. Under ZeRO-3 every item of the source is a gather that all
learner ranks take part in, so the source is drained to its end whatever happens to the sending:
leaving it in the middle would leave the other ranks alone in a collective.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeAlias

from quartet.errors import FatalError
from quartet.weights.digest import PushDigest, bucket_digest
from quartet.weights.manifest import Bucket
from quartet.weights.tensors import dtype_name
from quartet.weights.transport import Transport
from quartet.weights.worker import Worker

if TYPE_CHECKING:
    import torch

TensorSource: TypeAlias = "Callable[[], Iterator[tuple[int, torch.Tensor]]]"
"""Yields (bucket index, flat buffer) for every bucket of the plan, in order.

A buffer may be reused as soon as the next one is asked for.
"""


class SendLane:
    """Sends buckets, one after the other, and never waits longer than `timeout` for one.

    Without a transport it drains the source and sends nothing: all replicas have refused.

    Attributes:
        digests: Digest of each bucket sent so far; a bucket's is there before its bytes leave.
        started: When the first bucket left, by time.monotonic(); 0 before.
    """

    def __init__(
        self, buckets: Sequence[Bucket], transport: Transport | None, *, timeout: float
    ) -> None:
        self._buckets = buckets
        self._timeout = timeout
        self._transport = transport
        self._worker = Worker("quartet-send")
        self._broken: Future[None] = Future()
        self._lock = threading.Lock()
        self.error = ""
        self.digests: list[str] = []
        self.started = 0.0

    def break_off(self, why: str) -> None:
        """Send nothing more, from any thread; a send under way is left behind at once."""
        with self._lock:
            if not self._broken.done():
                self.error = why
                self._broken.set_result(None)

    def close(self) -> None:
        """Let go of transport and thread; a broken lane gives up what is under way."""
        self._worker.close()
        if self._transport is not None:
            self._transport.close(abort=self.broken)

    @property
    def broken(self) -> bool:
        """True once nothing more is sent."""
        return self._broken.done()

    def hexdigest(self) -> str:
        """Digest over all buckets."""
        total = PushDigest()
        for digest in self.digests:
            total.update(digest)
        return total.hexdigest()

    def pump(self, source: TensorSource) -> None:
        """Drain `source` to its end. Blocks; what went wrong with the sending is in `error`.

        Raises:
            FatalError: The source did not follow the plan.
            Exception: Whatever the source raises.
        """
        count = 0
        try:
            for index, flat in source():
                self._check(count, index, flat)
                count += 1
                if self._transport is not None and not self.broken:
                    self._send(self._buckets[index], flat, self._transport)
            if count != len(self._buckets):
                raise FatalError(f"the source gave {count} of {len(self._buckets)} buckets")
        except BaseException as error:
            self.break_off(f"the source of the weights failed: {error}")
            raise

    def _send(self, bucket: Bucket, flat: torch.Tensor, transport: Transport) -> None:
        self.started = self.started or time.monotonic()
        self.digests.append(bucket_digest(flat))
        job = self._worker.submit(transport.send, bucket, flat)
        done, _ = concurrent.futures.wait(
            {job, self._broken},
            timeout=self._timeout,
            return_when=concurrent.futures.FIRST_COMPLETED,
        )
        if not done:
            self.break_off(f"bucket {bucket.index} was not taken in {self._timeout:g} s")
        elif job in done and (error := job.exception()) is not None:
            self.break_off(f"bucket {bucket.index}: {error}")

    def _check(self, count: int, index: int, flat: torch.Tensor) -> None:
        bucket = self._buckets[index] if index == count and index < len(self._buckets) else None
        if bucket is None:
            raise FatalError(f"the source gave bucket {index} where {count} was due")
        if flat.numel() != bucket.numel or dtype_name(flat.dtype) != bucket.dtype:
            raise FatalError(
                f"bucket {index} is {flat.numel()} {dtype_name(flat.dtype)}, the plan says "
                f"{bucket.numel} {bucket.dtype}"
            )

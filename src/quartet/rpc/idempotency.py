"""One answer for one request_id, however often it is asked.

A repeat gets the first answer; a repeat while the first is at work waits for it. Failures are not
kept: the next repeat tries again. Another request under the same request_id is no repeat, and gets
no answer of the first: its caller would train on what it never asked for.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from google.protobuf.message import Message

from quartet.errors import RequestError

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class RequestDigest:
    """What tells a repeat from another request: a hash of the messages that a request is."""

    def __init__(self, *messages: Message) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        for message in messages:
            self.add(message)

    def add(self, message: Message) -> None:
        """Count the next message of a stream in."""
        # Deterministic: a map has no order of its own.
        data = message.SerializeToString(deterministic=True)
        self._hash.update(len(data).to_bytes(8, "little"))
        self._hash.update(data)

    def value(self) -> bytes:
        """The hash of all messages so far, 16 bytes."""
        return self._hash.digest()


@dataclass(slots=True)
class _Flight(Generic[Answer]):
    """Work under way and how many callers wait for it."""

    task: asyncio.Task[Answer]
    digest: bytes
    waiters: int = field(default=0)

    def tell_if_alone(self, task: asyncio.Task[Answer]) -> None:
        """Log a failure that nobody waits for any more; asyncio would call it a mistake."""
        if not self.waiters and not task.cancelled() and (error := task.exception()) is not None:
            log.warning("failed after its callers had gone: %s", error)


class IdempotencyCache(Generic[Answer]):
    """Remembers the answers of the last calls of one method.

    Args:
        max_entries: answers kept; the one not asked for longest goes first.
        stop_with_callers: cancel the work when its last caller has gone. False for work that must
            not stop half-way, such as an optimizer step: it goes on, and its answer is kept.
    """

    def __init__(self, max_entries: int = 256, *, stop_with_callers: bool = True) -> None:
        if max_entries < 1:
            raise ValueError(f"max_entries is {max_entries}, below 1")
        self._max_entries = max_entries
        self._stop_with_callers = stop_with_callers
        self._answers: OrderedDict[str, tuple[bytes, Answer]] = OrderedDict()
        self._flights: dict[str, _Flight[Answer]] = {}

    def __len__(self) -> int:
        """Answers kept."""
        return len(self._answers)

    async def run(
        self, request_id: str, request: RequestDigest, work: Callable[[], Awaitable[Answer]]
    ) -> Answer:
        """The answer to `request_id`: the kept one, the one under way, or that of `work` now.

        Raises:
            RequestError: the request_id was used for another request (REQUEST_ID_REUSED).
        """
        digest = request.value()
        if request_id in self._answers:
            first, answer = self._answers[request_id]
            _check_repeat(request_id, first, digest)
            self._answers.move_to_end(request_id)
            return answer
        flight = self._flights.get(request_id)
        if flight is None:
            task = asyncio.ensure_future(self._work(request_id, digest, work))
            flight = self._flights[request_id] = _Flight(task, digest)
            task.add_done_callback(flight.tell_if_alone)
        _check_repeat(request_id, flight.digest, digest)
        flight.waiters += 1
        try:
            # Shielded: one caller that goes away must not take the others' answer.
            return await asyncio.shield(flight.task)
        finally:
            flight.waiters -= 1
            if flight.waiters == 0 and self._stop_with_callers and not flight.task.done():
                # Forgotten at once: a repeat that comes now begins anew.
                self._flights.pop(request_id, None)
                flight.task.cancel()

    async def _work(
        self, request_id: str, digest: bytes, work: Callable[[], Awaitable[Answer]]
    ) -> Answer:
        try:
            answer = await work()
        finally:
            flight = self._flights.get(request_id)
            if flight is not None and flight.task is asyncio.current_task():
                del self._flights[request_id]
        self._answers[request_id] = (digest, answer)
        while len(self._answers) > self._max_entries:
            self._answers.popitem(last=False)
        return answer


def _check_repeat(request_id: str, first: bytes, now: bytes) -> None:
    if first != now:
        raise RequestError(
            f"request_id {request_id!r} was used for another request",
            reason="REQUEST_ID_REUSED",
            field="request_id",
            value=request_id,
            remedy="give every new request an id of its own, and repeat one unchanged",
        )

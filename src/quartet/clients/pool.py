"""Several replicas of one service as if they were one.

Each call goes to the replica with the least work in flight among those that serve, in turn where
they have as little. When one fails for reasons of its own (INFRA), the call goes to another, with
the same request_id; when all have failed it waits a little and begins again. Replicas come and go:
see `members`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from typing import Generic, Self, TypeVar

from quartet.clients.base import Client
from quartet.clients.members import Members, Replica, Standing
from quartet.config.rpc import RpcConfig
from quartet.errors import (
    DeadlineError,
    InfraError,
    QuartetError,
    StateError,
    UnavailableError,
)
from quartet.obs import metrics
from quartet.rpc import policy
from quartet.rpc.resolve import AddressBook

_logger = logging.getLogger(__name__)

AnyClient = TypeVar("AnyClient", bound=Client)
Answer = TypeVar("Answer")

_FIRST_BACKOFF = 0.1
_LONGEST_BACKOFF = 5.0
_NOTICE_SECONDS = 10.0
"""How often a caller is told of an outage that lasts."""
_CAUSE_CHARACTERS = 120
"""As much of a cause as fits on a line beside the address."""
_MOST_LACKS = 3
"""How often one call sends replicas back to be prepared before it takes their answer for final."""


class ReplicaPool(Generic[AnyClient]):
    """Spreads calls over replicas. Make it on the running loop; close it.

    Args:
        client_class: RolloutClient, RewardClient, RefClient or LearnerClient.
        addresses: "host1:port,host2:port", or a sequence of addresses. "dns:///name:port" and
            "file:///path" stand for replicas that may change; `open` reads them.
        rpc: settings of every client.
        max_in_flight: calls kept in flight for each replica that serves; further ones wait their
            turn.
        patience: seconds that a call waits for any replica to serve before it gives up. The time
            in which one is only being prepared does not count.
        say: told who joins and leaves, and that a call waits for a replica, at once and then every
            ten seconds; None logs it.
        remedy: what the error at the end of the patience advises.
    """

    def __init__(
        self,
        client_class: type[AnyClient],
        addresses: str | Sequence[str] | AddressBook,
        rpc: RpcConfig | None = None,
        *,
        max_in_flight: int = policy.CLIENT_CONCURRENCY,
        patience: float = 60.0,
        say: Callable[[str], None] | None = None,
        remedy: str = "",
    ) -> None:
        book = addresses if isinstance(addresses, AddressBook) else AddressBook(addresses)
        alone = len(book.entries) == 1 and not book.may_change
        self._room = client_class.room
        self._service = client_class.service
        self._book = book
        self._max_in_flight = max_in_flight
        self._in_flight = 0
        self._patience = patience
        self._turns = itertools.count()
        self._say = say or _logger.warning
        self._remedy = remedy
        self._said_at = -math.inf
        self.stale_reasons: Collection[str] = ()
        """Reasons of a StateError by which a replica says that it has to be prepared again."""
        self._members: Members[AnyClient] = Members(
            lambda address: client_class(address, rpc, max_in_flight=max_in_flight, retry=alone),
            book,
            room=self._room,
            say=self._say,
        )

    async def __aenter__(self) -> Self:
        """Use as `async with`."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Close."""
        await self.close()

    async def open(self) -> None:
        """Read the entries that may change, and follow them; nothing to do where there are none.

        Raises:
            ConfigError: a file of addresses cannot be read.
        """
        await self._members.open()

    async def close(self) -> None:
        """Stop watching and close every channel."""
        await self._members.close()

    def admit(
        self,
        *,
        check: Callable[[AnyClient], Awaitable[None]] | None = None,
        prepare: Callable[[AnyClient], Awaitable[None]] | None = None,
    ) -> None:
        """Say what a replica has to pass before it gets calls. Those that serve now go on.

        Args:
            check: raises ConfigError where a replica does not fit: it is named, and left out.
            prepare: gives a replica what it lacks. InfraError has it tried again after a pause;
                any other error is raised by all calls from then on.
        """
        self._members.check = check or self._members.check
        self._members.prepare = prepare or self._members.prepare

    @property
    def clients(self) -> list[AnyClient]:
        """One client a replica, in the order of the addresses."""
        return [replica.client for replica in self._members.replicas]

    @property
    def leaving(self) -> list[AnyClient]:
        """Clients of those that are off the list and end their last calls."""
        return [replica.client for replica in self._members.leaving]

    @property
    def entries(self) -> tuple[str, ...]:
        """The list as it was given."""
        return self._book.entries

    @property
    def may_change(self) -> bool:
        """Whether replicas may join and leave."""
        return self._book.may_change

    def serving(self) -> list[AnyClient]:
        """Clients of the replicas that serve now."""
        return [r.client for r in self._members.replicas if r.standing is Standing.SERVING]

    def fitting(self) -> list[AnyClient]:
        """Clients of those that serve, or will when they have been prepared."""
        return [r.client for r in self._members.replicas if r.fits]

    def accepted(self) -> list[AnyClient]:
        """Clients of all but those that do not fit: these are none of the run's business."""
        return [r.client for r in self._members.replicas if r.standing is not Standing.UNFIT]

    def standings(self) -> dict[str, Standing]:
        """How far each replica has come, by its address."""
        return {r.client.address: r.standing for r in self._members.replicas}

    def describe(self) -> str:
        """Where each replica stands and why, and what of the list cannot be read."""
        known = [f"{r.client.address}: {r.why}" for r in self._members.replicas]
        return "; ".join([*known, *self._book.problems]) or "the list of addresses is empty"

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds; it is looked at whenever a replica's state changes."""
        while not condition():
            await self._members.changed.wait()

    async def wait_ready(self, timeout: float) -> None:
        """Wait until every replica serves; raises as Client.wait_ready where one does not."""
        await asyncio.gather(*(self.wait_for(client, timeout) for client in self.clients))

    async def wait_for(self, client: AnyClient, timeout: float) -> None:
        """Wait until one replica serves; raises as Client.wait_ready where it does not."""
        await client.wait_ready(timeout)
        for replica in self._members.replicas:
            if replica.client is client:
                # Its watcher may be between two tries.
                self._members.serves(replica, "it answers SERVING")

    async def wait_fitting(self) -> list[AnyClient]:
        """Wait until `fitting` names somebody.

        Raises:
            UnavailableError: nobody came in `patience` seconds.
        """
        await self._wait_until(lambda: bool(self.fitting()), math.inf)
        return self.fitting()

    def prepared(self, now: Collection[str], lacks: Callable[[AnyClient], bool]) -> None:
        """Say that `prepare` has no work left at some replicas, and new work at others.

        Args:
            now: addresses of those that were given what there is.
            lacks: whether another one, which serves, has to be prepared again.
        """
        for replica in self._members.replicas:
            if replica.client.address in now and replica.fits:
                self._members.serves(replica, "it is ready")
            elif lacks(replica.client):
                self._members.lacks(replica, "it has not been prepared")

    async def each(self, call: Callable[[AnyClient], Awaitable[Answer]]) -> list[Answer]:
        """Make a call to every replica at once, serving or not; raises the first failure."""
        return list(await asyncio.gather(*(call(client) for client in self.clients)))

    async def call(
        self,
        method: str,
        call: Callable[[AnyClient, float], Awaitable[Answer]],
        *,
        weight: int = 1,
        timeout: float | None = None,
    ) -> Answer:
        """Make a call to one replica, and to others while it fails with INFRA.

        Args:
            method: name of the method, for deadline, metrics and log.
            call: makes the call, given a client and the seconds left. It must send the same
                request_id each time.
            weight: the work that the call brings, in a unit that all calls of the pool share. The
                replica with the least work under way gets it.
            timeout: seconds over all tries; None takes the deadline of rpc.policy.

        Raises:
            UnavailableError: no replica served for `patience` seconds; names all of them.
            DeadlineError: the time is over.
            QuartetError: whatever a replica answered that another try would not mend.

        Example:
            >>> await pool.call("Score", lambda client, left: client.score(
            ...     request_id=request_id, items=items, timeout=left))
        """
        seconds = timeout or policy.method_policy(self._service, method).deadline
        deadline = time.monotonic() + seconds
        # What is not sent yet can still go to whoever has the least to do by then.
        while self._in_flight >= self._max_in_flight * max(1, len(self.serving())):
            await self._members.changed.wait()
        self._in_flight += 1
        try:
            return await self._try_all(method, call, weight, deadline)
        finally:
            self._in_flight -= 1
            self._members.notify()

    async def _try_all(
        self,
        method: str,
        call: Callable[[AnyClient, float], Awaitable[Answer]],
        weight: int,
        deadline: float,
    ) -> Answer:
        backoff = _FIRST_BACKOFF
        tried: set[Replica[AnyClient]] = set()
        failure: QuartetError | None = None
        lacks = 0
        while True:
            replica = self._pick(tried)
            if replica is None and tried:
                if not isinstance(failure, InfraError):
                    raise failure or AssertionError("a replica was tried without an outcome")
                await self._pause(failure, backoff, deadline)
                backoff = min(2 * backoff, _LONGEST_BACKOFF)
                tried.clear()
                continue
            if replica is None:
                await self._wait_until(lambda: bool(self.serving()), deadline)
                continue
            if failure is not None:
                metrics.RPC_CLIENT_RETRIES.labels(self._service, method).inc()
            left = deadline - time.monotonic()
            if left <= 0:
                raise failure or DeadlineError(f"no time left for {method}", reason="DEADLINE")
            try:
                with _carrying(replica, weight):
                    return await call(replica.client, left)
            except (InfraError, StateError) as error:
                _logger.warning("%s: %s at %s", method, error, replica.client.address)
                failure = error
                if error.info.reason in self.stale_reasons and lacks < _MOST_LACKS:
                    lacks += 1
                    self._members.lacks(replica, error.message)
                    continue
                tried.add(replica)
                replica.why = error.message

    def _pick(self, tried: set[Replica[AnyClient]]) -> Replica[AnyClient] | None:
        """The serving replica with the least work in flight, without those just tried.

        Of several, the one whose last turn is longest ago: calls that come one at a time would
        else all go to the first address.
        """
        if self._members.failed is not None:
            raise self._members.failed
        replicas = self._members.replicas
        choice = [r for r in replicas if r.standing is Standing.SERVING and r not in tried]
        picked = min(choice, key=lambda r: (r.load, r.last_turn), default=None)
        if picked is not None:
            picked.last_turn = next(self._turns)
        return picked

    async def _pause(self, failure: InfraError, backoff: float, deadline: float) -> None:
        """Wait before the next round, as long as the server asked or with jitter."""
        wanted = failure.info.retry_after or backoff * random.uniform(0.5, 1.5)
        left = deadline - time.monotonic()
        if left <= wanted:
            raise failure
        await asyncio.sleep(wanted)

    async def _wait_until(self, condition: Callable[[], bool], deadline: float) -> None:
        """Wait until `condition` holds, no longer than patience and deadline allow.

        While a replica waits only to be prepared the patience does not run: a learner may be in
        the middle of a long step.
        """
        began = time.monotonic()
        while not condition():
            if self._members.failed is not None:
                raise self._members.failed
            now = time.monotonic()
            if any(r.is_hopeful for r in self._members.replicas):
                began = now
            left = min(deadline, began + self._patience) - now
            if left <= 0:
                raise self._nobody(now - began)
            self._say_so(left)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._members.changed.wait(), min(left, _NOTICE_SECONDS))
        self._said_at = -math.inf

    def _say_so(self, left: float) -> None:
        """Tell of the outage, once for all calls that wait for its end."""
        now = time.monotonic()
        if now - self._said_at >= _NOTICE_SECONDS:
            self._said_at = now
            who = " or ".join(
                f"{r.client.address} ({_shortened(r.why)})" for r in self._members.replicas
            )
            at = who or f"one of {', '.join(self._book.entries)}"
            self._say(f"waiting for {self._room} at {at}, up to {left:.0f} s")

    def _nobody(self, waited: float) -> UnavailableError:
        return UnavailableError(
            f"no {self._room} service for {waited:.1f} s ({self.describe()})",
            reason="NO_REPLICA",
            field=f"{self._room}.address",
            value=",".join(self._book.entries),
            remedy=self._remedy,
        )


@contextlib.contextmanager
def _carrying(replica: Replica[AnyClient], weight: int) -> Iterator[None]:
    """Count a call, and its work, at the replica that has it."""
    replica.calls += 1
    replica.load += weight
    try:
        yield
    finally:
        replica.calls -= 1
        replica.load -= weight


def _shortened(cause: str) -> str:
    """The beginning of a cause: gRPC's own texts go on for lines."""
    return cause if len(cause) <= _CAUSE_CHARACTERS else cause[:_CAUSE_CHARACTERS] + "..."

"""Several replicas of one service as if they were one.

Each call goes to the replica with the least work in flight among those that serve, in turn where
they have as little. When one fails for reasons of its own (INFRA), the call goes to another, with
the same request_id; when all have failed it waits a little and begins again. A watcher a replica
follows its health, so one that comes back is used at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

from quartet.clients.base import Client
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
from quartet.rpc.address import split_addresses

_logger = logging.getLogger(__name__)

AnyClient = TypeVar("AnyClient", bound=Client)
Answer = TypeVar("Answer")

_FIRST_BACKOFF = 0.1
_LONGEST_BACKOFF = 5.0
# Looking for a replica that is away costs little, and finding it late costs a run's time.
_LONGEST_WATCH_PAUSE = 1.0
_NOTICE_SECONDS = 10.0
"""How often a caller is told of an outage that lasts."""
_CAUSE_CHARACTERS = 120
"""As much of a cause as fits on a line beside the address."""


@dataclass(slots=True, eq=False)
class _Replica(Generic[AnyClient]):
    """One server and what is known of it."""

    client: AnyClient
    serving: bool = False
    last_error: str = "no answer yet"
    last_turn: int = -1
    """When it was last picked, counted in picks of its pool."""


class ReplicaPool(Generic[AnyClient]):
    """Spreads calls over replicas. Make it on the running loop; close it.

    Args:
        client_class: RolloutClient, RewardClient, RefClient or LearnerClient.
        addresses: "host1:port,host2:port", or a sequence of addresses.
        rpc: settings of every client.
        max_in_flight: calls kept in flight over all replicas; further ones wait their turn.
        patience: seconds that a call waits for any replica to serve before it gives up.
        say: told that a call waits for a replica, at once and then every ten seconds; None logs it.
        remedy: what the error at the end of the patience advises.
    """

    def __init__(
        self,
        client_class: type[AnyClient],
        addresses: str | Sequence[str],
        rpc: RpcConfig | None = None,
        *,
        max_in_flight: int = policy.CLIENT_CONCURRENCY,
        patience: float = 60.0,
        say: Callable[[str], None] | None = None,
        remedy: str = "",
    ) -> None:
        names = split_addresses(addresses if isinstance(addresses, str) else ",".join(addresses))
        self._replicas = [
            _Replica(client_class(name, rpc, max_in_flight=max_in_flight, retry=len(names) == 1))
            for name in names
        ]
        self._room = client_class.room
        self._service = client_class.service
        self._slots = asyncio.Semaphore(max_in_flight)
        self._patience = patience
        self._turns = itertools.count()
        self._say = say or _logger.warning
        self._remedy = remedy
        self._said_at = -math.inf
        self._changed = asyncio.Event()
        self._watchers = [asyncio.ensure_future(self._watch(r)) for r in self._replicas]

    async def __aenter__(self) -> Self:
        """Use as `async with`."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Close."""
        await self.close()

    async def close(self) -> None:
        """Stop watching and close every channel."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        for replica in self._replicas:
            await replica.client.close()

    @property
    def clients(self) -> list[AnyClient]:
        """One client a replica, in the order of the addresses."""
        return [replica.client for replica in self._replicas]

    def serving(self) -> list[AnyClient]:
        """Clients of the replicas that serve now."""
        return [replica.client for replica in self._replicas if replica.serving]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds; it is looked at whenever a replica's state changes."""
        while not condition():
            await self._changed.wait()

    async def wait_ready(self, timeout: float) -> None:
        """Wait until every replica serves; raises as Client.wait_ready where one does not."""

        async def wait(replica: _Replica[AnyClient]) -> None:
            await replica.client.wait_ready(timeout)
            # Its watcher may be between two tries.
            self._set(replica, True, "it answers SERVING")

        await asyncio.gather(*(wait(replica) for replica in self._replicas))

    async def each(self, call: Callable[[AnyClient], Awaitable[Answer]]) -> list[Answer]:
        """Make a call to every replica at once, serving or not; raises the first failure."""
        return list(await asyncio.gather(*(call(client) for client in self.clients)))

    async def call(
        self,
        method: str,
        call: Callable[[AnyClient, float], Awaitable[Answer]],
        *,
        timeout: float | None = None,
    ) -> Answer:
        """Make a call to one replica, and to others while it fails with INFRA.

        Args:
            method: name of the method, for deadline, metrics and log.
            call: makes the call, given a client and the seconds left. It must send the same
                request_id each time.
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
        async with self._slots:
            return await self._try_all(method, call, deadline)

    async def _try_all(
        self,
        method: str,
        call: Callable[[AnyClient, float], Awaitable[Answer]],
        deadline: float,
    ) -> Answer:
        backoff = _FIRST_BACKOFF
        tried: set[_Replica[AnyClient]] = set()
        failure: QuartetError | None = None
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
                await self._wait_for_one(deadline)
                continue
            if failure is not None:
                metrics.RPC_CLIENT_RETRIES.labels(self._service, method).inc()
            left = deadline - time.monotonic()
            if left <= 0:
                raise failure or DeadlineError(f"no time left for {method}", reason="DEADLINE")
            try:
                return await call(replica.client, left)
            except (InfraError, StateError) as error:
                _logger.warning("%s: %s at %s", method, error, replica.client.address)
                failure = error
                tried.add(replica)
                replica.last_error = error.message

    def _pick(self, tried: set[_Replica[AnyClient]]) -> _Replica[AnyClient] | None:
        """The serving replica with the least work in flight, without those just tried.

        Of several, the one whose last turn is longest ago: calls that come one at a time would
        else all go to the first address.
        """
        choice = [r for r in self._replicas if r.serving and r not in tried]
        picked = min(choice, key=lambda r: (r.client.in_flight, r.last_turn), default=None)
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

    async def _wait_for_one(self, deadline: float) -> None:
        """Wait until a replica serves, no longer than patience and deadline allow."""
        began = time.monotonic()
        limit = min(deadline, began + self._patience)
        while not self.serving():
            left = limit - time.monotonic()
            if left <= 0:
                raise self._nobody(time.monotonic() - began)
            self._say_so(left)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(left, _NOTICE_SECONDS))

    def _say_so(self, left: float) -> None:
        """Tell of the outage, once for all calls that wait for its end."""
        now = time.monotonic()
        if now - self._said_at >= _NOTICE_SECONDS:
            self._said_at = now
            who = " or ".join(
                f"{r.client.address} ({_shortened(r.last_error)})" for r in self._replicas
            )
            self._say(f"waiting for {self._room} at {who}, up to {left:.0f} s")

    def _nobody(self, waited: float) -> UnavailableError:
        states = "; ".join(f"{r.client.address}: {r.last_error}" for r in self._replicas)
        return UnavailableError(
            f"no {self._room} service for {waited:.1f} s ({states})",
            reason="NO_REPLICA",
            field=f"{self._room}.address",
            value=",".join(r.client.address for r in self._replicas),
            remedy=self._remedy,
        )

    async def _watch(self, replica: _Replica[AnyClient]) -> None:
        """Follow one replica's health for as long as the pool lives."""
        backoff = _FIRST_BACKOFF
        while True:
            try:
                async for state in replica.client.watch_health():
                    backoff = _FIRST_BACKOFF
                    self._set(replica, state == "SERVING", f"it answers {state}")
                self._set(replica, False, "it ended the connection")
            except QuartetError as error:
                self._set(replica, False, error.message)
            await asyncio.sleep(backoff * random.uniform(0.5, 1.5))
            backoff = min(2 * backoff, _LONGEST_WATCH_PAUSE)

    def _set(self, replica: _Replica[AnyClient], serving: bool, why: str) -> None:
        if serving != replica.serving:
            verb = "serves" if serving else f"does not serve: {why}"
            _logger.info("%s at %s %s", self._room, replica.client.address, verb)
            if serving:
                self._said_at = -math.inf
        replica.serving, replica.last_error = serving, why
        self._changed.set()
        self._changed = asyncio.Event()


def _shortened(cause: str) -> str:
    """The beginning of a cause: gRPC's own texts go on for lines."""
    return cause if len(cause) <= _CAUSE_CHARACTERS else cause[:_CAUSE_CHARACTERS] + "..."

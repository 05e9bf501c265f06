"""The replicas of one service: who is there, who fits, who has what it needs, who serves.

    DEAD -> STARTING -> STALE -> SERVING         and UNFIT for what does not fit the run

A watcher a replica follows its health. One that begins to serve is first checked (does it fit?) and
then prepared (a rollout service is given the weights); calls go to it when both are done. An answer
that shows a replica to lack something sends it back to STALE, and a lost connection to DEAD, from
where it comes back the same way. Entries of the list that may change are read again and again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from quartet.clients.base import Client
from quartet.errors import ConfigError, InfraError, QuartetError, StateError
from quartet.rpc.resolve import AddressBook

_logger = logging.getLogger(__name__)

AnyClient = TypeVar("AnyClient", bound=Client)

_FIRST_BACKOFF = 0.1
# Looking for a replica that is away costs little, and finding it late costs a run's time.
_LONGEST_WATCH_PAUSE = 1.0
# A push to a replica that does not take it keeps the learner from its work.
_LONGEST_ADMISSION_PAUSE = 30.0
_FIRST_ADMISSION_PAUSE = 1.0
_REREAD_SECONDS = 1.0
"""How often lists of addresses are read again."""

HOPELESS = 3
"""Preparations that fail in a row until nobody waits for the replica any more."""


class Standing(StrEnum):
    """How far a replica has come. Calls go to SERVING ones only."""

    DEAD = "dead"
    """Nobody answers."""
    STARTING = "starting"
    """It answers, and loads or is being checked."""
    UNFIT = "unfit"
    """It serves, but not for this run. It stays out until it is started again."""
    STALE = "stale"
    """It fits, and lacks what the others have been given."""
    SERVING = "serving"


@dataclass(slots=True, eq=False)
class Replica(Generic[AnyClient]):
    """One server and what is known of it."""

    client: AnyClient
    standing: Standing = Standing.DEAD
    why: str = "no answer yet"
    """The cause of its standing."""
    healthy: bool = False
    """It says that it serves."""
    term: int = 0
    """Counts the times that it went away: what was learnt before may hold no longer."""
    checked_in: int = -1
    """The term in which it was found to fit."""
    failures: int = 0
    """Preparations that failed in a row."""
    wanted: bool = False
    """It has lost its standing anew, so the pause between two tries is over."""
    leaving: bool = False
    """It is on the list no more, and ends the calls that it has."""
    calls: int = 0
    """Calls under way."""
    load: int = 0
    """Work under way, as the calls are weighed."""
    last_turn: int = -1
    """When it was picked last, counted in picks of its pool."""
    watcher: asyncio.Task[None] | None = None
    admission: asyncio.Task[None] | None = None

    @property
    def fits(self) -> bool:
        """Whether it has been checked and lives."""
        return self.standing in (Standing.STALE, Standing.SERVING)

    @property
    def is_hopeful(self) -> bool:
        """Whether it will serve as soon as it has been prepared."""
        return self.standing is Standing.STALE and self.failures < HOPELESS


class Members(Generic[AnyClient]):
    """Keeps the list of replicas and their standing. Make it on the running loop; close it."""

    def __init__(
        self,
        connect: Callable[[str], AnyClient],
        book: AddressBook,
        *,
        room: str,
        say: Callable[[str], None],
    ) -> None:
        """Begin with the addresses that `book` knows; `open` reads the others.

        Args:
            connect: makes a client for an address.
            book: the list.
            room: what the replicas are, for messages.
            say: told who joins, leaves, or does not fit.
        """
        self.check: Callable[[AnyClient], Awaitable[None]] | None = None
        """Raises ConfigError where a replica does not fit. May be set later."""
        self.prepare: Callable[[AnyClient], Awaitable[None]] | None = None
        """Gives a replica what it lacks. May be set later."""
        self.failed: BaseException | None = None
        """Why the run cannot go on."""
        self.replicas: list[Replica[AnyClient]] = []
        """In the order of the list."""
        self.leaving: list[Replica[AnyClient]] = []
        """Those that end their last calls."""
        self.changed = asyncio.Event()
        """Set, and replaced by another, at every change."""
        self._connect = connect
        self._book = book
        self._room = room
        self._say = say
        self._said: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_open = False
        self._follow(book.addresses)

    async def open(self) -> None:
        """Read the whole list, and follow it from now on.

        Raises:
            ConfigError: a file of addresses cannot be read, or an address in it not be dialled.
        """
        await self._book.open()
        self._follow(self._book.addresses)
        self._is_open = True
        if self._book.may_change:
            self._start(self._reread())

    async def close(self) -> None:
        """Stop watching and close every channel."""
        everybody = [*self.replicas, *self.leaving]
        tasks = [t for r in everybody for t in (r.watcher, r.admission) if t is not None]
        tasks += self._tasks
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for replica in everybody:
            await replica.client.close()

    def notify(self) -> None:
        """Wake all who wait for a change."""
        self.changed.set()
        self.changed = asyncio.Event()

    def serves(self, replica: Replica[AnyClient], why: str) -> None:
        """Take a replica for ready."""
        replica.failures = 0
        self._set(replica, Standing.SERVING, why)

    def lacks(self, replica: Replica[AnyClient], why: str) -> None:
        """Send a replica that serves back: it has to be prepared again."""
        if replica.standing is Standing.SERVING:
            replica.wanted = True
            self._set(replica, Standing.STALE, why)
            self._admit(replica)

    def _follow(self, addresses: Iterable[str]) -> None:
        """Take in who is new on the list, and let go who is there no more."""
        wanted = list(addresses)
        known = {replica.client.address: replica for replica in self.replicas}
        for address, replica in known.items():
            if address not in wanted:
                self._let_go(replica)
        kept: list[Replica[AnyClient]] = []
        for address in wanted:
            replica = known.get(address) or self._take_in(address)
            if replica is not None:
                kept.append(replica)
        self.replicas = kept
        self.notify()

    def _take_in(self, address: str) -> Replica[AnyClient] | None:
        try:
            replica = Replica(self._connect(address))
        except ConfigError as error:
            if not self._is_open:
                raise
            self._once(f"{self._room} at {address} is left out: {error}")
            return None
        replica.watcher = asyncio.ensure_future(self._watch(replica))
        if self._is_open:
            self._say(f"{self._room} at {address} is on the list")
        return replica

    def _let_go(self, replica: Replica[AnyClient]) -> None:
        self._say(f"{self._room} at {replica.client.address} is off the list")
        replica.leaving = True
        self._set(replica, Standing.DEAD, "it is off the list")
        if replica.watcher is not None:
            replica.watcher.cancel()
        self.leaving.append(replica)
        self._start(self._see_off(replica))

    async def _see_off(self, replica: Replica[AnyClient]) -> None:
        """Close a channel when its last call has ended, and nobody gives it weights."""
        while replica.calls:
            await self.changed.wait()
        if replica.admission is not None:
            await asyncio.wait({replica.admission})
        await replica.client.close()
        self.leaving.remove(replica)

    async def _reread(self) -> None:
        while True:
            await asyncio.sleep(_REREAD_SECONDS)
            for problem in await self._book.refresh():
                self._say(f"{self._room}: {problem}; going on with what is known")
            if set(self._book.addresses) != {r.client.address for r in self.replicas}:
                self._follow(self._book.addresses)

    async def _watch(self, replica: Replica[AnyClient]) -> None:
        """Follow one replica's health for as long as it is on the list."""
        backoff = _FIRST_BACKOFF
        while True:
            try:
                async for state in replica.client.watch_health():
                    backoff = _FIRST_BACKOFF
                    if state == "SERVING":
                        replica.healthy = True
                        self._admit(replica)
                    else:
                        self._lose(replica, Standing.STARTING, f"it answers {state}")
                self._lose(replica, Standing.DEAD, "it ended the connection")
            except QuartetError as error:
                self._lose(replica, Standing.DEAD, error.message)
            await asyncio.sleep(backoff * random.uniform(0.5, 1.5))
            backoff = min(2 * backoff, _LONGEST_WATCH_PAUSE)

    def _lose(self, replica: Replica[AnyClient], standing: Standing, why: str) -> None:
        replica.term += replica.healthy
        replica.healthy = False
        replica.failures = 0
        self._set(replica, standing, why)

    def _admit(self, replica: Replica[AnyClient]) -> None:
        """Let a healthy replica serve, when it has passed what there is to pass."""
        if self.check is None and self.prepare is None:
            self.serves(replica, "it answers SERVING")
        elif replica.admission is None or replica.admission.done():
            replica.admission = asyncio.ensure_future(self._admission(replica))

    async def _admission(self, replica: Replica[AnyClient]) -> None:
        """Check and prepare a replica until it serves, is found unfit, or is gone.

        It is not cancelled when the replica goes away: a push to it would go on at the learner.
        """
        pause = _FIRST_ADMISSION_PAUSE
        while replica.healthy and not replica.leaving and replica.standing is not Standing.SERVING:
            term, replica.wanted = replica.term, False
            try:
                unfit = await self._pass_once(replica, term)
            except (InfraError, StateError) as error:
                replica.failures += 1
                if replica.healthy and term == replica.term:
                    self._set(replica, replica.standing, error.message)
                await self._wait(replica, pause * random.uniform(0.75, 1.25))
                pause = min(2 * pause, _LONGEST_ADMISSION_PAUSE)
                continue
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                self.failed = error
                self.notify()
                return
            if term != replica.term:
                continue
            if unfit:
                self._once(f"{self._room} at {replica.client.address} is left out: {unfit}")
                self._set(replica, Standing.UNFIT, unfit)
            else:
                self.serves(replica, "it is ready")
            return

    async def _pass_once(self, replica: Replica[AnyClient], term: int) -> str:
        """Check and prepare; returns why the replica does not fit, or nothing.

        Raises:
            InfraError, StateError: another try may succeed.
        """
        if replica.checked_in != term:
            self._set(replica, Standing.STARTING, "it is being checked")
            try:
                if self.check is not None:
                    await self.check(replica.client)
            except (InfraError, StateError):
                raise
            except QuartetError as error:
                return str(error)
            replica.checked_in = term
        if self.prepare is not None and term == replica.term and not replica.leaving:
            if replica.standing is not Standing.STALE:
                self._set(replica, Standing.STALE, "it has not been prepared")
            await self.prepare(replica.client)
        return ""

    async def _wait(self, replica: Replica[AnyClient], seconds: float) -> None:
        """Pause between two tries; ends early when there is another cause to try, or none."""
        term = replica.term

        async def changed() -> None:
            while term == replica.term and not (replica.leaving or replica.wanted):
                await self.changed.wait()

        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(changed(), seconds)

    def _set(self, replica: Replica[AnyClient], standing: Standing, why: str) -> None:
        if standing is not replica.standing:
            serving = standing is Standing.SERVING
            verb = "serves" if serving else f"is {standing}: {why}"
            _logger.info("%s at %s %s", self._room, replica.client.address, verb)
        replica.standing, replica.why = standing, why
        self.notify()

    def _once(self, line: str) -> None:
        """Say a line, but never again."""
        if line not in self._said:
            self._said.add(line)
            self._say(line)

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

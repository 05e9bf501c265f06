"""Bring the replicas of a push together: who refuses or is late is left out, the rest goes on."""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from quartet.errors import QuartetError, RequestError
from quartet.types import PushBackend, Rendezvous, WeightManifest
from quartet.types.requests import (
    AbortWeightsRequest,
    PrepareWeightsRequest,
    ReceiveWeightsRequest,
)
from quartet.weights.group import (
    BroadcastGroup,
    SenderStore,
    arrival_key,
    connect_store,
    form_group,
    local_address_towards,
)
from quartet.weights.lane import SendLane
from quartet.weights.manifest import Bucket, plan_buckets
from quartet.weights.member import Member
from quartet.weights.transport import GroupTransport
from quartet.weights.worker import Worker

ABORT_SECONDS = 1.0
"""Most seconds that telling the replicas of a failure may add to it: one may be stuck."""
_GRACE = 1.0
"""Seconds for an answer to come back after the group's own timeout has passed on the other side."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PushPlan:
    """What does not change between attempts."""

    manifest: WeightManifest
    policy_version: int
    backend: PushBackend
    group_timeout: float
    """Seconds: the longest wait for one operation."""
    device: str
    """Where the sender's NCCL buffers lie."""

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The manifest, cut."""
        return plan_buckets(self.manifest)

    @property
    def receive_timeout(self) -> float:
        """Seconds that a whole receive may take: every operation as late as it may be."""
        return self.group_timeout * (len(self.buckets) + 2)

    def prepare_request(
        self, *, epoch: int, request_id: str, rendezvous: Rendezvous, rank: int, world_size: int
    ) -> PrepareWeightsRequest:
        """Invite one replica."""
        return PrepareWeightsRequest(
            request_id=request_id,
            epoch=epoch,
            policy_version=self.policy_version,
            manifest=self.manifest,
            backend=self.backend,
            rendezvous=rendezvous,
            rank=rank,
            world_size=world_size,
            group_timeout=self.group_timeout,
        )


async def assemble_group(
    members: Sequence[Member], plan: PushPlan, *, epoch: int
) -> tuple[SendLane, int]:
    """Form a group of all members that will take the push, and wait until they are READY.

    A group cannot lose a member and live, so each refusal costs a new attempt with the rest, under
    a new epoch and a new group name.

    Returns:
        The way to the members that have not failed, and the epoch that stands.
    """
    await asyncio.gather(*(ask_ranks(m, plan) for m in members if not m.failed))
    remaining = [m for m in members if not m.failed]
    while remaining:
        lane = await _Attempt(remaining, plan, epoch).run()
        if lane is not None:
            return lane, epoch
        remaining = [m for m in remaining if not m.failed]
        epoch += 1
    return SendLane(plan.buckets, None, timeout=plan.group_timeout), epoch


async def ask_ranks(member: Member, plan: PushPlan) -> None:
    """Learn how many ranks a replica takes: an engine's workers may each be a member."""
    try:
        info = await member.target.get_info(timeout=plan.group_timeout)
    except Exception as error:
        member.fail("prepare", error)
    else:
        member.num_ranks = info.ranks_in(plan.backend)


class _Attempt:
    """One try to form one group."""

    def __init__(self, members: Sequence[Member], plan: PushPlan, epoch: int) -> None:
        self._members = members
        self._plan = plan
        self._epoch = epoch
        self._group_name = f"push-{epoch}-{uuid.uuid4().hex}"
        ends = list(itertools.accumulate((m.num_ranks for m in members), initial=1))
        self._first_ranks = dict(zip(members, ends, strict=False))
        self._world_size = ends[-1]
        self._refused: set[Member] = set()

    async def run(self) -> SendLane | None:
        """All members READY: the way to them. Else the guilty have failed, the rest is aborted."""
        try:
            host = sender_host([m.target.address for m in self._members])
            store = SenderStore(host, timeout=self._plan.group_timeout)
        except (OSError, RuntimeError, RequestError) as error:
            for member in self._members:
                member.fail("prepare", f"no way to meet this replica: {error}")
            return None
        group = await self._form(store, host)
        if group is None:
            # One that refused has nothing of this push; its epoch may be another sender's there.
            joined = [m for m in self._members if m not in self._refused]
            begin_abort_all(joined, self._epoch, "another replica did not join")
            return None
        transport = GroupTransport(group)
        lane = SendLane(self._plan.buckets, transport, timeout=self._plan.group_timeout)
        if await await_ready(self._members, lane, self._plan, self._epoch):
            return lane
        lane.break_off("not all replicas were READY")
        lane.close()
        begin_abort_all(self._members, self._epoch, "another replica did not begin to receive")
        return None

    async def _form(self, store: SenderStore, host: str) -> BroadcastGroup | None:
        plan = self._plan
        worker = Worker(f"quartet-join-{self._epoch}")
        own = asyncio.wrap_future(
            worker.submit(
                form_group,
                backend=plan.backend,
                store=store.store,
                group_name=self._group_name,
                rank=0,
                world_size=self._world_size,
                host=host,
                timeout=plan.group_timeout,
                device=plan.device,
            )
        )
        worker.close()
        calls = {
            m: asyncio.create_task(self._prepare(m, rank, store.address(host)))
            for m, rank in self._first_ranks.items()
        }
        try:
            pending = await _wait_for_all({own, *calls.values()}, plan.group_timeout)
            if own in pending:  # those who wait for the late one are about to say so
                pending = await _wait_for_all(pending, _GRACE)
            errors = {m: _error_of(call) for m, call in calls.items()}
            if not pending and not any(errors.values()) and own.exception() is None:
                return own.result()
            late = any(isinstance(e, TimeoutError) for e in (*errors.values(), _error_of(own)))
            if own.done() and not any((*errors.values(), own.exception())):
                # All have met, and some do not say so: they are the ones that stand still.
                silent = TimeoutError(f"no answer within {plan.group_timeout:g} s")
                errors = {m: silent if c in pending else None for m, c in calls.items()}
            self._blame(errors, await self._arrived(store, host), late=late or own in pending)
            own.add_done_callback(_close_late_group)
            return None
        finally:
            for call in calls.values():
                call.cancel()
            await asyncio.wait(calls.values())

    async def _prepare(self, member: Member, rank: int, store_address: str) -> None:
        plan = self._plan
        rendezvous = Rendezvous(store_address=store_address, group_name=self._group_name)
        request = plan.prepare_request(
            epoch=self._epoch,
            request_id=f"{self._group_name}-{rank}",
            rendezvous=rendezvous,
            rank=rank,
            world_size=self._world_size,
        )
        await member.prepare(request, timeout=plan.group_timeout + _GRACE)

    async def _arrived(self, store: SenderStore, host: str) -> set[Member]:
        """Members that came to the meeting: whoever waits there is not the one who is late."""
        from torch.distributed import PrefixStore

        def look() -> set[Member]:
            # A connection of its own: the sender's is held by its own wait for the others.
            own = connect_store(store.address(host), timeout=_GRACE)
            keys = PrefixStore(self._group_name, own)
            return {
                m
                for m, first in self._first_ranks.items()
                if keys.check([arrival_key(rank) for rank in range(first, first + m.num_ranks)])
            }

        look_up = Worker("quartet-arrivals")
        found = asyncio.wrap_future(look_up.submit(look))
        look_up.close()
        return await found

    def _blame(
        self, errors: Mapping[Member, BaseException | None], arrived: set[Member], *, late: bool
    ) -> None:
        """Fail those who refused, or else those who did not come, or else all who failed."""
        failed = {m: e for m, e in errors.items() if e is not None}
        refused = {m: e for m, e in failed.items() if _refusal(e)}
        absent = {m: e for m, e in errors.items() if m not in arrived}
        lost = {m: e for m, e in absent.items() if e is not None}
        guilty = refused or lost or (absent if late else {}) or failed or errors
        self._refused = set(refused)
        for member, error in guilty.items():
            member.fail("prepare", error or f"did not join within {self._plan.group_timeout:g} s")


async def await_ready(
    members: Sequence[Member], lane: SendLane, plan: PushPlan, epoch: int
) -> bool:
    """Open all streams of events; False, with the guilty failed, unless all are READY."""
    request = ReceiveWeightsRequest(epoch=epoch, policy_version=plan.policy_version)
    ready = {
        m: m.begin_receive(request, lane, timeout=plan.receive_timeout, on_loss=lane.break_off)
        for m in members
    }
    await asyncio.wait(
        ready.values(), timeout=plan.group_timeout, return_when=asyncio.FIRST_EXCEPTION
    )
    if not any(m.failed for m in members):
        for member in (m for m, future in ready.items() if not future.done()):
            member.fail("receive", f"not READY within {plan.group_timeout:g} s")
    if not any(m.failed for m in members):
        return True
    for member in members:
        await member.stop_watching()
    return False


def begin_abort_all(members: Sequence[Member], epoch: int, cause: str) -> None:
    """The same without a wait: a replica that stands still must not hold up the others' push."""
    request = AbortWeightsRequest(epoch=epoch, cause=cause)
    for member in members:
        member.begin_abort(request, timeout=ABORT_SECONDS)


async def abort_all(members: Sequence[Member], epoch: int, cause: str) -> None:
    """Tell all members of an epoch that it is over, within ABORT_SECONDS."""
    request = AbortWeightsRequest(epoch=epoch, cause=cause)
    await asyncio.gather(*(m.abort(request, timeout=ABORT_SECONDS) for m in members))


def sender_host(addresses: Sequence[str]) -> str:
    """The address of this machine that every replica can reach it by.

    One address for all: gloo listens on one. The way to another machine also serves replicas on
    this one, the loopback address serves no other.
    """
    local = [local_address_towards(*split_address(address)) for address in addresses]
    return next((a for a in local if not ipaddress.ip_address(a).is_loopback), local[0])


def split_address(address: str) -> tuple[str, int]:
    """Host and port of a gRPC address; a unix socket is on this machine.

    Example:
        >>> split_address("dns:///rollout:7001"), split_address("unix:/run/r.sock")
        (('rollout', 7001), ('127.0.0.1', 1))
    """
    if address.startswith("unix:"):
        return "127.0.0.1", 1
    bare = address.rsplit("/", 1)[-1]
    for scheme in ("dns:", "ipv4:", "ipv6:"):
        bare = bare.removeprefix(scheme)
    parts = urlsplit(f"//{bare}")
    if not parts.hostname:
        raise RequestError(
            f"{address} names no host",
            reason="ADDRESS_INVALID",
            field="addresses",
            value=address,
            remedy="write host:port",
        )
    return parts.hostname, parts.port or 1


async def _wait_for_all(
    calls: Iterable[asyncio.Future[Any]], timeout: float
) -> set[asyncio.Future[Any]]:
    """Wait until all are done or one has failed; those that are not done."""
    _, pending = await asyncio.wait(calls, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
    return pending


def _error_of(call: asyncio.Future[Any]) -> BaseException | None:
    return call.exception() if call.done() and not call.cancelled() else None


def _refusal(error: BaseException) -> bool:
    """True when the replica itself says no; waiting in vain for another is INFRA."""
    return isinstance(error, QuartetError) and error.error_class != "INFRA"


def _close_late_group(formed: asyncio.Future[BroadcastGroup]) -> None:
    if not formed.cancelled() and formed.exception() is None:
        formed.result().close(abort=True)

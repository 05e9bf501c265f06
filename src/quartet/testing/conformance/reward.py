"""What a reward server must do. `docs/reward-servers.md` states the same in prose.

results = await run_checks(CHECKS, RewardSubject(address="127.0.0.1:7002"))
"""

from __future__ import annotations

import asyncio
import math
import re
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc

from quartet import codec
from quartet.api.reward.v1.reward_service_pb2_grpc import RewardServiceStub
from quartet.clients.reward import RewardClient
from quartet.config.rpc import RpcConfig
from quartet.errors import DeadlineError, RequestError, StateError
from quartet.rpc.channel import create_channel
from quartet.rpc.errors import from_rpc_error
from quartet.testing.conformance import Skipped, require
from quartet.types import Failure, Reward, ScoreBatch, ScoreItem, ScoreRequest

NUM_CONCURRENT_CALLS = 32
DEADLINE_SECONDS = 0.5
PATIENCE_SECONDS = 120.0
"""Longest wait for an answer that has to come."""
READY_SECONDS = 30.0
"""Longest wait for a server that is still starting."""


def default_items() -> tuple[ScoreItem, ...]:
    """Items that any scorer of text can be asked about, with a label for those that compare."""
    texts = ("2 + 3 = 5", "2 + 3 = 6", "I do not know", "", "日本語 and \N{SLIGHTLY SMILING FACE}")
    return tuple(
        ScoreItem(
            sample_id=f"item-{i}",
            prompt="What is 2 + 3? ",
            query=f"What is 2 + 3? {text}",
            label="5",
        )
        for i, text in enumerate(texts)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardSubject:
    """A server, and what it can be asked."""

    address: str
    rpc: RpcConfig | None = None
    items: tuple[ScoreItem, ...] = ()
    """At least two items that it can score; none takes `default_items`."""
    failing: ScoreItem | None = None
    """An item that it cannot score."""
    slow: ScoreItem | None = None
    """An item that takes it several times DEADLINE_SECONDS."""
    is_deterministic: bool = True
    """The same item gets the same reward each time, to 1e-3."""
    is_exclusive: bool = False
    """Nobody else uses it, so it may be put to sleep."""

    def fresh_items(self) -> tuple[ScoreItem, ...]:
        """The items under names that were never used before."""
        return tuple(self.fresh(item) for item in self.items or default_items())

    @staticmethod
    def fresh(item: ScoreItem) -> ScoreItem:
        """The item under a name that was never used before."""
        return replace(item, sample_id=f"{item.sample_id}-{uuid.uuid4().hex[:12]}")


async def says_what_it_is(subject: RewardSubject) -> None:
    """GetInfo names service, contract, replica and scorers, and says the same twice."""
    async with _client(subject) as client:
        info = await client.get_info()
        again = await client.get_info()
    require(info.info.service == "reward", f"info.service is {info.info.service!r}, not 'reward'")
    require(info.info.api_version == "v1", f"info.api_version is {info.info.api_version!r}")
    require(info.info.replica, "info.replica is empty")
    require(info.scorers, "scorers is empty")
    require(info == again, "two GetInfo calls give two answers")


async def says_that_it_serves(subject: RewardSubject) -> None:
    """grpc.health.v1 answers SERVING for the service's full name."""
    async with _client(subject) as client:
        await client.wait_ready(READY_SECONDS)


async def scores_one(subject: RewardSubject) -> None:
    """A call with one item gets one result, signed with the replica of GetInfo and its digest."""
    item = subject.fresh_items()[0]
    async with _client(subject) as client:
        info = (await client.get_info()).info
        batch = await client.score(request_id=_new_id(), items=[item], timeout=PATIENCE_SECONDS)
    _require_results(batch, [item])
    require(not _failures(batch), f"a scorable item failed: {_failures(batch)}")
    require(batch.replica == info.replica, f"replica is {batch.replica!r}, not {info.replica!r}")
    require(batch.digest == info.digest, f"digest is {batch.digest!r}, not {info.digest!r}")


async def keeps_the_order(subject: RewardSubject) -> None:
    """Results come in the order of the items, whatever order the server works in."""
    items = [item for _ in range(4) for item in subject.fresh_items()]
    rewards: list[dict[str, float]] = []
    for order in (items, items[::-1]):
        batch = await _score(subject, ScoreRequest(request_id=_new_id(), items=tuple(order)))
        _require_results(batch, order)
        rewards.append(
            {r.sample_id: r.outcome.reward for r in batch.results if isinstance(r.outcome, Reward)}
        )
    if subject.is_deterministic:
        forward, backward = rewards
        for name, reward in forward.items():
            other = backward.get(name)
            require(
                other is not None and math.isclose(reward, other, rel_tol=1e-3, abs_tol=1e-3),
                f"{name} got {reward} in one order of the items and {other} in another",
            )


async def refuses_what_is_no_request(subject: RewardSubject) -> None:
    """No items, no request_id, or one sample twice: INVALID_ARGUMENT with the field's name."""
    items = subject.fresh_items()
    wrong = {
        "items": ScoreRequest(request_id=_new_id(), items=()),
        "request_id": ScoreRequest(request_id="", items=items),
        "sample_id": ScoreRequest(request_id=_new_id(), items=(items[0], items[0])),
    }
    for field, request in wrong.items():
        try:
            await _score(subject, request)
        except RequestError as error:
            named = error.info.field
            require(field in named, f"a wrong {field} is refused, but blamed on {named!r}")
        else:
            require(False, f"a request with a wrong {field} was accepted")


async def answers_a_repeat_with_the_first_answer(subject: RewardSubject) -> None:
    """A request_id that was answered gets that answer again, and is refused to another request."""
    items = subject.fresh_items()
    first = ScoreRequest(request_id=_new_id(), items=items)
    answer = await _score(subject, first)
    require(await _score(subject, first) == answer, "a repeat got another answer")
    # A server that scores again, or looks at the id alone, answers this one too.
    other = replace(first, items=subject.fresh_items())
    try:
        await _score(subject, other)
    except RequestError:
        return
    require(False, "other items under a request_id that was answered got an answer")


async def joins_repeats_under_way(subject: RewardSubject) -> None:
    """Calls with one request_id at the same time get one and the same answer."""
    request = ScoreRequest(request_id=_new_id(), items=subject.fresh_items())
    answers = await asyncio.gather(*(_score(subject, request) for _ in range(8)))
    require(all(a == answers[0] for a in answers), "concurrent repeats got different answers")


async def types_its_failures(subject: RewardSubject) -> None:
    """What cannot be scored has a typed failure in its place, and its neighbours are scored."""
    if subject.failing is None:
        raise Skipped("no item is known that it cannot score")
    items = list(subject.fresh_items()[:2])
    items.insert(1, subject.fresh(subject.failing))
    batch = await _score(subject, ScoreRequest(request_id=_new_id(), items=tuple(items)))
    _require_results(batch, items)
    failed = [isinstance(result.outcome, Failure) for result in batch.results]
    require(failed == [False, True, False], f"failed are {failed}, not the middle one alone")
    failure = batch.results[1].outcome
    assert isinstance(failure, Failure)
    require(failure.message, "the failure has no message")
    require(
        re.fullmatch(r"[A-Z][A-Z0-9_]*", failure.reason),
        f"the failure's reason is {failure.reason!r}, not UPPER_SNAKE_CASE",
    )


async def keeps_deadlines(subject: RewardSubject) -> None:
    """A call whose deadline passes ends with it, and the server goes on serving."""
    if subject.slow is None:
        raise Skipped("no item is known that takes it long")
    request = ScoreRequest(request_id=_new_id(), items=(subject.fresh(subject.slow),))
    began = time.monotonic()
    try:
        await _score(subject, request, timeout=DEADLINE_SECONDS)
    except DeadlineError:
        took = time.monotonic() - began
        require(took < DEADLINE_SECONDS + 2.0, f"it ended {took:.1f} s after its start")
    else:
        require(False, "a slow item was scored before the deadline: it cannot be checked")
    await scores_one(subject)


async def serves_many_at_once(subject: RewardSubject) -> None:
    """Concurrent calls all get their own results."""

    async def call() -> None:
        items = subject.fresh_items()
        batch = await _score(subject, ScoreRequest(request_id=_new_id(), items=items))
        _require_results(batch, items)

    await asyncio.gather(*(call() for _ in range(NUM_CONCURRENT_CALLS)))


async def takes_large_items(subject: RewardSubject) -> None:
    """A query of a megabyte gets a result, be it a failure, and no broken call."""
    [first, *_] = subject.fresh_items()
    large = replace(first, query=first.prompt + "word " * 200_000)
    batch = await _score(subject, ScoreRequest(request_id=_new_id(), items=(large,)))
    _require_results(batch, [large])


async def sleeps_and_wakes(subject: RewardSubject) -> None:
    """After Sleep, Score is refused with FAILED_PRECONDITION; after Wake it works."""
    async with _client(subject) as client:
        if "sleep" not in (await client.get_info()).info.capabilities:
            raise Skipped("it does not offer sleep")
        if not subject.is_exclusive:
            raise Skipped("others may be using it")
        await client.sleep()
        try:
            await _score(subject, ScoreRequest(request_id=_new_id(), items=subject.fresh_items()))
        except StateError:
            pass
        else:
            require(False, "it scored while asleep")
        finally:
            await client.wake()
    await scores_one(subject)


CHECKS = (
    says_that_it_serves,  # first: it waits for a server that is still starting
    says_what_it_is,
    scores_one,
    keeps_the_order,
    refuses_what_is_no_request,
    answers_a_repeat_with_the_first_answer,
    joins_repeats_under_way,
    types_its_failures,
    keeps_deadlines,
    serves_many_at_once,
    takes_large_items,
    sleeps_and_wakes,
)


def _new_id() -> str:
    return f"conformance-{uuid.uuid4().hex}"


@asynccontextmanager
async def _client(subject: RewardSubject) -> AsyncIterator[RewardClient]:
    async with RewardClient(subject.address, subject.rpc, retry=False) as client:
        yield client


async def _score(
    subject: RewardSubject, request: ScoreRequest, *, timeout: float = PATIENCE_SECONDS
) -> ScoreBatch:
    """Send a request as it is, also one that the client class would not make.

    Raises:
        QuartetError: what the server's status means.
    """
    async with create_channel(subject.address, subject.rpc, retry=False) as channel:
        stub: Any = RewardServiceStub(channel)
        try:
            answer = await stub.Score(codec.encode_score_request(request), timeout=timeout)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, subject.address) from error
    return codec.decode_score_batch(answer)


def _require_results(batch: ScoreBatch, items: Sequence[ScoreItem]) -> None:
    got, wanted = [r.sample_id for r in batch.results], [item.sample_id for item in items]
    require(got == wanted, f"results are for {got}, items were {wanted}")


def _failures(batch: ScoreBatch) -> list[str]:
    return [r.outcome.message for r in batch.results if isinstance(r.outcome, Failure)]

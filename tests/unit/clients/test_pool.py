"""Several replicas as one: dead ones, those that come back, those that have no room."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from quartet.clients import ReplicaPool, RewardClient
from quartet.config.rpc import RpcConfig
from quartet.errors import (
    ConfigError,
    DataError,
    DeadlineError,
    ErrorInfo,
    FatalError,
    InfraError,
    StateError,
    UnavailableError,
)
from quartet.obs import metrics
from quartet.testing.fakes import FakeReward
from quartet.testing.loopback import loopback
from quartet.types import ScoreItem

ITEM = ScoreItem(sample_id="s", prompt="", query="eel")
Pool = ReplicaPool[RewardClient]


async def score(pool: Pool, request_id: str = "r", timeout: float = 20) -> Any:
    return await pool.call(
        "Score",
        lambda client, left: client.score(request_id=request_id, items=[ITEM], timeout=left),
        timeout=timeout,
    )


@pytest.fixture
def fakes() -> list[FakeReward]:
    return [FakeReward(), FakeReward()]


@pytest.fixture
async def servers() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
async def pool(fakes: list[FakeReward], servers: AsyncExitStack) -> AsyncIterator[Pool]:
    addresses = [await servers.enter_async_context(loopback(fake)) for fake in fakes]
    async with ReplicaPool(RewardClient, addresses, patience=0.5) as pool:
        await pool.wait_ready(10)
        yield pool


def counts(fakes: list[FakeReward]) -> list[int]:
    return [fake.script.count("Score") for fake in fakes]


async def test_calls_one_at_a_time_go_round(pool: Pool, fakes: list[FakeReward]) -> None:
    for number in range(6):
        await score(pool, f"{number}")
        assert abs(counts(fakes)[0] - counts(fakes)[1]) <= 1
    assert counts(fakes) == [3, 3]


async def test_the_replica_with_least_work_is_called(pool: Pool, fakes: list[FakeReward]) -> None:
    gates = [fake.script.hold("Score") for fake in fakes]
    calls = [asyncio.ensure_future(score(pool, f"{i}")) for i in range(6)]
    for fake in fakes:
        await fake.script.until(lambda fake=fake: fake.script.count("Score") == 3)
    gates[0].set()
    await fakes[0].script.until(lambda: fakes[0].script.count("Score") == 3)
    for finished in itertools.islice(asyncio.as_completed(calls), 3):
        await finished
    calls.append(asyncio.ensure_future(score(pool, "late")))
    await fakes[0].script.until(lambda: fakes[0].script.count("Score") == 4)
    gates[1].set()
    await asyncio.gather(*calls)
    assert counts(fakes) == [4, 3]


async def test_a_failing_replica_is_left_for_another_with_the_same_request_id(
    pool: Pool, fakes: list[FakeReward]
) -> None:
    labels = {"service": RewardClient.service, "method": "Score"}
    name = "quartet_rpc_client_retries_total"
    before = metrics.REGISTRY.get_sample_value(name, labels) or 0
    fakes[0].script.fail("Score", InfraError("broken"))
    assert (await score(pool, "same")).results
    assert counts(fakes) == [1, 1]
    ids = [call.request.request_id for fake in fakes for call in fake.script.calls]
    assert ids == ["same", "same"]
    assert metrics.REGISTRY.get_sample_value(name, labels) == before + 1


async def test_when_all_fail_it_begins_again_with_a_pause(
    pool: Pool, fakes: list[FakeReward]
) -> None:
    for fake in fakes:
        fake.script.fail("Score", UnavailableError("full", reason="QUEUE_FULL"), times=2)
    began = time.monotonic()
    await score(pool)
    assert time.monotonic() - began > 0.05 + 0.1  # two pauses, each at least half its backoff
    assert sum(counts(fakes)) == 5


async def test_the_pause_is_as_long_as_the_server_asks(pool: Pool, fakes: list[FakeReward]) -> None:
    for fake in fakes:
        error = InfraError("wait", info=ErrorInfo(retry_after=0.4))
        fake.script.fail("Score", error, times=1)
    began = time.monotonic()
    await score(pool)
    assert 0.4 <= time.monotonic() - began < 10


@pytest.mark.parametrize("error", [DataError("x"), FatalError("x"), ValueError("x")])
async def test_what_another_replica_would_not_mend_is_raised(
    pool: Pool, fakes: list[FakeReward], error: Exception
) -> None:
    for fake in fakes:
        fake.script.fail("Score", error)
    with pytest.raises((DataError, FatalError)):
        await score(pool)
    assert sum(counts(fakes)) == 1


async def test_a_replica_in_another_state_is_left_for_one_that_fits(
    pool: Pool, fakes: list[FakeReward]
) -> None:
    fakes[0].script.fail("Score", StateError("stale"))
    assert (await score(pool)).results
    fakes[1].script.fail("Score", StateError("stale too"))
    with pytest.raises(StateError):
        await score(pool, "again")


async def test_the_deadline_covers_all_tries(pool: Pool, fakes: list[FakeReward]) -> None:
    for fake in fakes:
        fake.script.fail("Score", InfraError("broken"))
    began = time.monotonic()
    with pytest.raises(InfraError, match="broken"):
        await score(pool, timeout=0.5)
    assert time.monotonic() - began < 10


async def test_a_call_that_hangs_ends_at_the_deadline(pool: Pool, fakes: list[FakeReward]) -> None:
    for fake in fakes:
        fake.script.hold("Score")
    with pytest.raises(DeadlineError):
        await score(pool, timeout=0.3)
    assert sum(counts(fakes)) == 1


async def test_dead_replica_is_not_called_and_one_that_comes_back_is(
    fakes: list[FakeReward], servers: AsyncExitStack
) -> None:
    alive = await servers.enter_async_context(loopback(fakes[0]))
    async with loopback(fakes[1]) as address:
        pool = ReplicaPool(RewardClient, f"{alive},{address}", patience=5)
        servers.push_async_callback(pool.close)
        await pool.wait_ready(10)
    await pool.until(lambda: len(pool.serving()) == 1)
    for i in range(4):
        await score(pool, f"dead-{i}")
    assert counts(fakes) == [4, 0]
    rpc = RpcConfig(port=int(address.rpartition(":")[2]), drain_seconds=0)
    await servers.enter_async_context(loopback(fakes[1], rpc))
    await asyncio.wait_for(pool.until(lambda: len(pool.serving()) == 2), 10)
    gate = fakes[0].script.hold("Score")
    calls = [asyncio.ensure_future(score(pool, f"back-{i}")) for i in range(2)]
    await fakes[1].script.until(lambda: fakes[1].script.count("Score") == 1)
    gate.set()
    await asyncio.gather(*calls)


async def test_a_call_waits_for_a_replica_to_come(servers: AsyncExitStack) -> None:
    async with loopback(FakeReward()) as address:
        pass  # Nobody is there any more.
    pool = ReplicaPool(RewardClient, address, patience=10)
    servers.push_async_callback(pool.close)
    call = asyncio.ensure_future(score(pool))
    await asyncio.sleep(0.1)
    rpc = RpcConfig(port=int(address.rpartition(":")[2]), drain_seconds=0)
    await servers.enter_async_context(loopback(FakeReward(), rpc))
    assert (await call).results


async def test_all_dead_names_all() -> None:
    async with ReplicaPool(RewardClient, "127.0.0.1:1,127.0.0.1:2", patience=0.5) as pool:
        with pytest.raises(UnavailableError) as caught:
            await score(pool)
    text = str(caught.value)
    assert "127.0.0.1:1: UNAVAILABLE" in text
    assert "127.0.0.1:2: UNAVAILABLE" in text
    assert caught.value.info.field == "reward.address"


async def test_an_outage_is_told_once_and_its_end_names_the_remedy() -> None:
    said: list[str] = []
    async with ReplicaPool(
        RewardClient, "127.0.0.1:1", patience=0.5, say=said.append, remedy="start it again"
    ) as pool:
        outcomes = await asyncio.gather(*(score(pool) for _ in range(5)), return_exceptions=True)
    (line,) = said
    assert line.startswith("waiting for reward at 127.0.0.1:1 (")
    assert line.endswith("), up to 0 s")
    assert all("(start it again)" in str(outcome) for outcome in outcomes)


async def test_an_outage_that_lasts_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quartet.clients.pool._NOTICE_SECONDS", 0.1)
    said: list[str] = []
    async with ReplicaPool(RewardClient, "127.0.0.1:1", patience=0.6, say=said.append) as pool:
        with pytest.raises(UnavailableError):
            await score(pool)
    assert len(said) >= 3
    assert "UNAVAILABLE" in said[-1]


async def test_calls_are_bounded_by_the_replicas_that_serve(
    fakes: list[FakeReward], servers: AsyncExitStack
) -> None:
    gates = [fake.script.hold("Score") for fake in fakes]
    addresses = [await servers.enter_async_context(loopback(fake)) for fake in fakes]
    async with ReplicaPool(RewardClient, addresses, max_in_flight=1) as pool:
        await pool.wait_ready(10)
        calls = [asyncio.ensure_future(score(pool, f"{i}")) for i in range(6)]
        for fake in fakes:
            await fake.script.until(lambda fake=fake: fake.script.count("Score") == 1)
        assert sum(counts(fakes)) == 2
        for gate in gates:
            gate.set()
        await asyncio.gather(*calls)
    assert sum(counts(fakes)) == 6


async def test_cancelling_a_call_cancels_it_at_the_server(
    pool: Pool, fakes: list[FakeReward]
) -> None:
    for fake in fakes:
        fake.script.hold("Score")
    call = asyncio.ensure_future(score(pool))
    await fakes[0].script.until(lambda: fakes[0].script.count("Score") == 1)
    call.cancel()
    await fakes[0].script.until(lambda: fakes[0].script.cancelled == ["Score"])
    assert counts(fakes) == [1, 0]


async def test_each_asks_all(pool: Pool) -> None:
    infos = await pool.each(lambda client: client.get_info())
    assert [info.info.service for info in infos] == ["reward", "reward"]


async def test_wait_ready_names_the_one_that_is_missing(servers: AsyncExitStack) -> None:
    address = await servers.enter_async_context(loopback(FakeReward()))
    async with ReplicaPool(RewardClient, f"{address},127.0.0.1:1") as pool:
        with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1 after"):
            await pool.wait_ready(0.3)


async def test_addresses_that_are_none() -> None:
    with pytest.raises(ConfigError):
        ReplicaPool(RewardClient, "host")

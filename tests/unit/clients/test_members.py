"""Replicas that join, leave, do not fit, or have to be prepared first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from quartet.clients import ReplicaPool, RolloutClient
from quartet.clients.members import Standing
from quartet.config.rpc import RpcConfig
from quartet.errors import ConfigError, FatalError, InfraError, StateError, UnavailableError
from quartet.testing.fakes import FakeRollout
from quartet.testing.loopback import loopback
from quartet.types import GenerateResult, PromptGroup, SamplingParams, ServerInfo

Pool = ReplicaPool[RolloutClient]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quartet.clients.members._REREAD_SECONDS", 0.02)
    monkeypatch.setattr("quartet.clients.members._FIRST_ADMISSION_PAUSE", 0.02)


class Band:
    """Fakes on loopback, and a file that lists them."""

    def __init__(self, stack: AsyncExitStack, file: Path) -> None:
        self.stack = stack
        self.file = file
        self.said: list[str] = []
        self.fakes: dict[str, FakeRollout] = {}
        self._doors: dict[str, AsyncExitStack] = {}

    async def serve(self, port: int = 0) -> str:
        fake = FakeRollout(ServerInfo(service="rollout", replica=f"fake-{len(self.fakes)}"))
        door = await self.stack.enter_async_context(AsyncExitStack())
        rpc = RpcConfig(port=port, drain_seconds=0)
        address = await door.enter_async_context(loopback(fake, rpc))
        self.fakes[address], self._doors[address] = fake, door
        return address

    async def stop(self, address: str) -> None:
        await self._doors[address].aclose()

    def list(self, *addresses: str) -> None:
        self.file.write_text("".join(f"{address}\n" for address in addresses))

    async def pool(self, addresses: str = "", **options: float) -> Pool:
        pool = ReplicaPool(
            RolloutClient, addresses or f"file://{self.file}", say=self.said.append, **options
        )
        await self.stack.enter_async_context(pool)
        await pool.open()
        return pool

    def counts(self) -> list[int]:
        return [fake.script.count("Generate") for fake in self.fakes.values()]


@pytest.fixture
async def band(tmp_path: Path) -> AsyncIterator[Band]:
    async with AsyncExitStack() as stack:
        yield Band(stack, tmp_path / "addresses")


async def generate(pool: Pool, name: str, *, samples: int = 1) -> GenerateResult:
    group = PromptGroup(group_id=name, prompt_token_ids=(1, 2), num_samples=samples)
    return await pool.call(
        "Generate",
        lambda client, left: client.generate(
            request_id=name, groups=[group], sampling=SamplingParams(max_new_tokens=2), timeout=left
        ),
        weight=samples,
    )


async def until(pool: Pool, **standings: Standing) -> None:
    """Wait for standings, by port with a letter before it."""
    wanted = {f"127.0.0.1:{port[1:]}": standing for port, standing in standings.items()}
    async with asyncio.timeout(60):
        await pool.until(lambda: pool.standings() == wanted)


def key(address: str) -> str:
    return "p" + address.rpartition(":")[2]


async def test_a_replica_on_the_list_gets_calls_and_one_off_it_ends_its_last(band: Band) -> None:
    first = await band.serve()
    band.list(first)
    pool = await band.pool()
    await until(pool, **{key(first): Standing.SERVING})
    gate = band.fakes[first].hold_group("long")
    long = asyncio.ensure_future(generate(pool, "long"))
    await band.fakes[first].script.until(lambda: band.counts() == [1])

    second = await band.serve()
    band.list(second)
    await until(pool, **{key(second): Standing.SERVING})
    for number in range(3):
        assert (await generate(pool, f"{number}")).replica == "fake-1"
    assert not long.done()
    assert [client.address for client in pool.leaving] == [first]
    gate.set()
    assert (await long).replica == "fake-0"
    async with asyncio.timeout(60):
        await pool.until(lambda: not pool.leaving)
    assert band.counts() == [1, 3]
    assert band.said == [
        f"rollout at {first} is off the list",
        f"rollout at {second} is on the list",
    ]


async def test_a_call_waits_for_somebody_to_be_listed(band: Band) -> None:
    band.list()
    pool = await band.pool(patience=20)
    call = asyncio.ensure_future(generate(pool, "a"))
    async with asyncio.timeout(60):
        while not band.said:  # noqa: ASYNC110 - it says so when it waits
            await asyncio.sleep(0.01)
    assert band.said[0].startswith(f"waiting for rollout at one of file://{band.file}, up to")
    band.list(await band.serve())
    assert (await call).replica == "fake-0"


async def test_an_empty_list_is_named_at_the_end_of_the_patience(band: Band) -> None:
    band.list()
    pool = await band.pool(patience=0.1)
    with pytest.raises(UnavailableError, match="the list of addresses is empty"):
        await generate(pool, "a")


async def test_a_list_that_cannot_be_read_any_more_changes_nothing(band: Band) -> None:
    first = await band.serve()
    band.list(first)
    pool = await band.pool()
    band.file.write_text("nonsense\n")
    async with asyncio.timeout(60):
        while not band.said:  # noqa: ASYNC110 - said when it was read
            await asyncio.sleep(0.01)
    (line,) = band.said
    assert line.endswith("address 'nonsense' has no port; going on with what is known")
    assert (await generate(pool, "a")).replica == "fake-0"


async def test_one_that_cannot_be_dialled_is_left_out(band: Band) -> None:
    first = await band.serve()
    band.list(first)
    pool = await band.pool()
    await until(pool, **{key(first): Standing.SERVING})
    band.list(first, "10.0.0.1:7001")
    async with asyncio.timeout(60):
        while not band.said:  # noqa: ASYNC110 - said when it was read
            await asyncio.sleep(0.01)
    assert "rollout at 10.0.0.1:7001 is left out: 10.0.0.1:7001 is on another" in band.said[0]
    assert [c.address for c in pool.clients] == [first]
    await generate(pool, "a")
    assert len(band.said) == 1


async def test_one_that_does_not_fit_is_named_once_and_left_out(band: Band) -> None:
    first, second = await band.serve(), await band.serve()
    band.list(first)
    pool = await band.pool()
    await until(pool, **{key(first): Standing.SERVING})
    mended = False

    async def check(client: RolloutClient) -> None:
        if (await client.get_info()).info.replica == "fake-1":
            raise ConfigError("it has another tokenizer")

    pool.admit(check=check)
    band.list(first, second)
    await until(pool, **{key(first): Standing.SERVING, key(second): Standing.UNFIT})
    for number in range(3):
        assert (await generate(pool, f"{number}")).replica == "fake-0"
    # Started again as it is, and then as it should be.
    port = int(second.rpartition(":")[2])
    await band.stop(second)
    await until(pool, **{key(first): Standing.SERVING, key(second): Standing.DEAD})
    assert not mended
    await band.serve(port)
    await until(pool, **{key(first): Standing.SERVING, key(second): Standing.SERVING})
    assert band.said == [
        f"rollout at {second} is on the list",
        f"rollout at {second} is left out: it has another tokenizer",
    ]


async def test_calls_wait_until_a_replica_is_prepared_and_their_patience_does_not_run(
    band: Band,
) -> None:
    first = await band.serve()
    pool = await band.pool(first, patience=0.2)
    may_end = asyncio.Event()
    prepared: list[str] = []

    async def prepare(client: RolloutClient) -> None:
        prepared.append(client.address)
        await may_end.wait()

    pool.admit(prepare=prepare)
    await until(pool, **{key(first): Standing.STALE})
    call = asyncio.ensure_future(generate(pool, "a"))
    await asyncio.sleep(0.5)  # longer than the patience
    assert not call.done()
    assert [c.address for c in pool.fitting()] == [first]
    assert pool.serving() == []
    may_end.set()
    assert (await call).replica == "fake-0"
    assert prepared == [first]


async def test_a_preparation_that_fails_is_tried_again(band: Band) -> None:
    first = await band.serve()
    pool = await band.pool(first)
    tries = 0

    async def prepare(client: RolloutClient) -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise InfraError("no room")

    pool.admit(prepare=prepare)
    assert (await generate(pool, "a")).replica == "fake-0"
    assert tries == 3


async def test_a_new_need_ends_the_pause_after_a_failure(
    band: Band, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quartet.clients.members._FIRST_ADMISSION_PAUSE", 1000.0)
    first = await band.serve()
    pool = await band.pool(first)
    tries = 0

    async def prepare(client: RolloutClient) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise InfraError("no room")

    pool.admit(prepare=prepare)
    await until(pool, **{key(first): Standing.STALE})
    async with asyncio.timeout(60):
        await pool.until(lambda: "no room" in pool.describe())
    # A push for all reaches it, and the next one does not.
    pool.prepared({first}, lambda client: False)
    assert pool.standings() == {first: Standing.SERVING}
    pool.prepared((), lambda client: True)
    assert pool.standings() == {first: Standing.STALE}
    await until(pool, **{key(first): Standing.SERVING})
    assert tries == 2


async def test_one_that_is_never_prepared_is_not_waited_for(band: Band) -> None:
    first = await band.serve()
    pool = await band.pool(first, patience=0.2)

    async def prepare(client: RolloutClient) -> None:
        raise InfraError("no room for the weights")

    pool.admit(prepare=prepare)
    with pytest.raises(UnavailableError, match="no room for the weights"):
        await generate(pool, "a")


async def test_what_ends_the_run_in_a_preparation_is_raised_by_calls(band: Band) -> None:
    pool = await band.pool(await band.serve())

    async def prepare(client: RolloutClient) -> None:
        raise FatalError("weights are not finite")

    pool.admit(prepare=prepare)
    with pytest.raises(FatalError, match="not finite"):
        await generate(pool, "a")


async def test_one_that_says_it_is_stale_is_prepared_again_while_another_works(
    band: Band,
) -> None:
    first, second = await band.serve(), await band.serve()
    pool = await band.pool(f"{first},{second}")
    await until(pool, **{key(first): Standing.SERVING, key(second): Standing.SERVING})
    may_end = asyncio.Event()

    async def prepare(client: RolloutClient) -> None:
        await may_end.wait()
        band.fakes[client.address].script.heal("Generate")

    pool.admit(prepare=prepare)
    pool.stale_reasons = {"REPLICA_STALE"}
    band.fakes[first].script.fail("Generate", StateError("stale", reason="REPLICA_STALE"))
    for number in range(3):
        assert (await generate(pool, f"{number}")).replica == "fake-1"
    assert band.counts() == [1, 3]
    may_end.set()
    await until(pool, **{key(first): Standing.SERVING, key(second): Standing.SERVING})
    assert (await generate(pool, "last")).replica == "fake-0"


async def test_one_that_stays_stale_is_believed_in_the_end(band: Band) -> None:
    first = await band.serve()
    pool = await band.pool(first)
    await until(pool, **{key(first): Standing.SERVING})

    async def prepare(client: RolloutClient) -> None:
        """Change nothing."""

    pool.admit(prepare=prepare)
    pool.stale_reasons = {"REPLICA_STALE"}
    band.fakes[first].script.fail("Generate", StateError("stale", reason="REPLICA_STALE"))
    with pytest.raises(StateError, match="stale"):
        await generate(pool, "a")
    assert band.counts() == [4]


async def test_a_restarted_replica_is_checked_and_prepared_again(band: Band) -> None:
    first = await band.serve()
    pool = await band.pool(first)
    await until(pool, **{key(first): Standing.SERVING})
    seen: list[str] = []

    async def check(client: RolloutClient) -> None:
        seen.append("check")

    async def prepare(client: RolloutClient) -> None:
        seen.append((await client.get_info()).info.replica)

    pool.admit(check=check, prepare=prepare)
    await band.stop(first)
    await until(pool, **{key(first): Standing.DEAD})
    await band.serve(int(first.rpartition(":")[2]))
    await until(pool, **{key(first): Standing.SERVING})
    assert seen == ["check", "fake-1"]


async def test_work_counts_in_samples_and_not_in_calls(band: Band) -> None:
    first, second = await band.serve(), await band.serve()
    pool = await band.pool(f"{first},{second}")
    await pool.wait_ready(10)
    gates = [fake.script.hold("Generate") for fake in band.fakes.values()]
    calls = [asyncio.ensure_future(generate(pool, "heavy", samples=8))]
    await asyncio.sleep(0)
    calls += [asyncio.ensure_future(generate(pool, f"light-{i}", samples=2)) for i in range(4)]
    async with asyncio.timeout(60):
        while sum(band.counts()) < 5:  # noqa: ASYNC110 - over two fakes
            await asyncio.sleep(0.01)
    assert sorted(band.counts()) == [1, 4]
    for gate in gates:
        gate.set()
    await asyncio.gather(*calls)

"""What rollout replicas are told by the trainer: who is caught up, woken, resumed, left alone."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from quartet.clients import ReplicaPool, RolloutClient
from quartet.clients.members import Standing
from quartet.config.rpc import RpcConfig
from quartet.errors import ConfigError, StateError
from quartet.testing.fakes import FakeRollout
from quartet.testing.loopback import loopback
from quartet.trainer.adapters import PooledSampler
from quartet.types import PushResult, ReplicaPushResult, ReplicaState, ServerInfo


class Stage:
    """Fakes on loopback behind a sampler, and who was caught up."""

    def __init__(self, stack):
        self.stack = stack
        self.fakes, self.doors, self.caught_up = {}, {}, []

    async def serve(self, name, port=0, fake=None):
        fake = fake or FakeRollout(ServerInfo(service="rollout", replica=name))
        door = await self.stack.enter_async_context(AsyncExitStack())
        address = await door.enter_async_context(
            loopback(fake, RpcConfig(port=port, drain_seconds=0))
        )
        self.fakes[address], self.doors[address] = fake, door
        return address

    async def sampler(self, *addresses, **options):
        self.pool = await self.stack.enter_async_context(ReplicaPool(RolloutClient, addresses))
        await self.pool.wait_ready(60)
        made = PooledSampler(self.pool, **options)

        async def catch_up(address):
            self.caught_up.append(address)
            self.fakes[address].policy_version = 7
            made.pushed(7, pushed(address, self.fakes[address]))

        made.catch_up = catch_up
        return made

    async def go_and_come_back(self, address, fake):
        await self.doors[address].aclose()
        await self.until(address, Standing.DEAD)
        await self.serve("new", int(address.rpartition(":")[2]), fake)
        await self.until(address, Standing.SERVING)

    async def until(self, address, standing):
        async with asyncio.timeout(60):
            await self.pool.until(lambda: self.pool.standings()[address] is standing)


def pushed(address, fake):
    return PushResult(
        replicas=(ReplicaPushResult(address=address, replica=fake.replica, committed=True),)
    )


@pytest.fixture
async def stage():
    async with AsyncExitStack() as stack:
        yield Stage(stack)


async def test_a_connection_that_broke_costs_no_push(stage):
    address = await stage.serve("a")
    sampler, fake = await stage.sampler(address), stage.fakes[address]
    fake.policy_version = 7
    sampler.pushed(7, pushed(address, fake))
    await stage.go_and_come_back(address, fake)
    assert stage.caught_up == []
    # It may have been left paused by a barrier whose end it did not hear of.
    assert fake.script.count("Resume") == 1


@pytest.mark.parametrize("version", [0, 7, 40])
async def test_another_process_is_caught_up_whatever_version_it_has(stage, version):
    address = await stage.serve("a")
    sampler = await stage.sampler(address)
    sampler.pushed(7, pushed(address, stage.fakes[address]))
    other = FakeRollout(ServerInfo(service="rollout", replica="b"))
    other.policy_version = version
    await stage.go_and_come_back(address, other)
    assert stage.caught_up == [address]
    assert other.policy_version == 7


async def test_before_the_first_push_there_is_nothing_to_catch_up_with(stage):
    address = await stage.serve("a")
    await stage.sampler(address)
    await stage.go_and_come_back(address, stage.fakes[address])
    assert stage.caught_up == []


@pytest.mark.parametrize(("sleeps", "wakes"), [(False, 1), (True, 0)])
async def test_one_that_another_run_left_asleep_is_woken(stage, sleeps, wakes):
    address = await stage.serve("a")
    sampler, fake = await stage.sampler(address, sleeps=sleeps), stage.fakes[address]
    fake.policy_version = 7
    sampler.pushed(7, pushed(address, fake))
    fake.state = ReplicaState.ASLEEP
    await stage.go_and_come_back(address, fake)
    assert fake.script.count("Wake") == wakes


async def test_those_that_do_not_fit_are_let_alone(stage):
    first, second = await stage.serve("a"), await stage.serve("b")
    sampler = await stage.sampler(first, second)

    async def check(client):
        if client.address == second:
            raise ConfigError("it is another run's")

    stage.pool.admit(check=check)
    await stage.doors[second].aclose()
    await stage.until(second, Standing.DEAD)
    await stage.serve("b", int(second.rpartition(":")[2]), stage.fakes[second])
    await stage.until(second, Standing.UNFIT)
    await sampler.sleep(1)
    await sampler.wake()
    await sampler.resume()
    assert [c.method for c in stage.fakes[first].script.calls] == ["Sleep", "Wake", "Resume"]
    assert stage.fakes[second].script.calls == []


async def test_one_that_loads_cannot_sleep_and_that_is_no_failure(stage):
    address = await stage.serve("a")
    sampler, fake = await stage.sampler(address), stage.fakes[address]
    fake.script.fail("Sleep", StateError("the engine is still loading", reason="REPLICA_STARTING"))
    with pytest.raises(StateError):
        await sampler.sleep(1)
    checked = asyncio.Event()

    async def check(client):
        await checked.wait()

    stage.pool.admit(check=check)
    await stage.doors[address].aclose()
    await stage.until(address, Standing.DEAD)
    await stage.serve("a", int(address.rpartition(":")[2]), fake)
    await stage.until(address, Standing.STARTING)
    await sampler.sleep(1)
    assert fake.script.count("Sleep") == 2

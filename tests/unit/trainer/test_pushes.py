"""Who is pushed to and when: the optimizer's steps, pushes and catching up take turns."""

import asyncio
import io

import pytest

from quartet.errors import FatalError, InfraError, UnavailableError
from quartet.obs.progress import Progress
from quartet.trainer.launch import Launcher
from quartet.trainer.pushes import Pushes
from quartet.trainer.rest import Rest
from quartet.types import PauseMode, PushResult, ReplicaPushResult


class Replicas:
    """Rollout replicas by address, and what they were told."""

    def __init__(self, *addresses):
        self.addresses = list(addresses)
        self.versions = {}
        self.events = []
        self.catch_up = None

    async def to_push_to(self):
        if not self.addresses:
            raise UnavailableError("no rollout service")
        return tuple(self.addresses)

    def pushed(self, policy_version, result):
        self.versions |= {r.address: policy_version for r in result.replicas if r.committed}

    def has(self, address, policy_version):
        return self.versions.get(address) == policy_version

    async def pause(self, mode):
        self.events.append(mode)

    async def resume(self):
        self.events.append("resume")


class Learner:
    """Pushes, unless an address is in `refused`."""

    def __init__(self, events):
        self.events = events
        self.refused = set()
        self.gate = asyncio.Event()
        self.gate.set()

    async def push_weights(self, *, request_id, policy_version, addresses):
        self.events.append(("push", policy_version, tuple(addresses)))
        await self.gate.wait()
        return PushResult(
            replicas=tuple(
                ReplicaPushResult(
                    address=address,
                    committed=address not in self.refused,
                    failed_phase="" if address not in self.refused else "receive",
                    error="" if address not in self.refused else "it died",
                )
                for address in addresses
            )
        )


class Stage:
    def __init__(self, folder, *addresses, barrier=False):
        self.replicas = Replicas(*addresses)
        self.learner = Learner(self.replicas.events)
        progress = Progress(stream=io.StringIO())
        self.pushes = Pushes(
            self.learner,
            self.replicas,
            Launcher(folder, [], probe=None, progress=progress),
            rest=Rest(None, {}),
            barrier=barrier,
            run_id="run",
            policy_version=6,
            progress=progress,
        )

    @property
    def pushed(self):
        return [e[1:] for e in self.replicas.events if e[0] == "push"]


async def settled(*tasks):
    """Let tasks come as far as they can."""
    for _ in range(20):
        await asyncio.sleep(0)
    return [task.done() for task in tasks]


async def test_a_push_goes_to_those_that_are_there(tmp_path):
    stage = Stage(tmp_path, "a", "b")
    await stage.pushes.start()
    stage.replicas.addresses = ["b", "c"]
    async with stage.pushes.weights:
        await stage.pushes.push("step 1")
    assert stage.pushed == [(7, ("a", "b")), (8, ("b", "c"))]
    assert stage.replicas.versions == {"a": 7, "b": 8, "c": 8}


async def test_the_run_goes_on_with_those_that_took_it_and_the_other_catches_up(tmp_path):
    stage = Stage(tmp_path, "a", "b")
    stage.learner.refused = {"b"}
    await stage.pushes.start()
    assert stage.replicas.versions == {"a": 7}
    with pytest.raises(InfraError, match="b does not have version 7: receive failed, it died"):
        await stage.replicas.catch_up("b")
    stage.learner.refused = set()
    await stage.replicas.catch_up("b")
    assert stage.pushed == [(7, ("a", "b")), (7, ("b",)), (7, ("b",))]
    assert stage.replicas.versions == {"a": 7, "b": 7}
    assert (stage.pushes.policy_version, stage.pushes.count) == (7, 1)


async def test_no_optimizer_step_comes_between_a_version_and_catching_up(tmp_path):
    stage = Stage(tmp_path, "a")
    await stage.pushes.start()
    # The policy has been trained since: what it is now is no version yet.
    async with stage.pushes.weights:
        late = asyncio.ensure_future(stage.pushes.catch_up("b"))
        assert await settled(late) == [False]
        assert len(stage.pushed) == 1
        await stage.pushes.push("step 1")
    await late
    assert stage.pushed == [(7, ("a",)), (8, ("a",)), (8, ("b",))]
    # And the other way round: training waits while a replica catches up.
    stage.learner.gate.clear()
    late = asyncio.ensure_future(stage.pushes.catch_up("c"))
    step = asyncio.ensure_future(stage.pushes.weights.acquire())
    assert await settled(late, step) == [False, False]
    stage.learner.gate.set()
    await asyncio.gather(late, step)


async def test_whoever_was_reached_by_the_push_it_waited_for_is_not_pushed_to_again(tmp_path):
    stage = Stage(tmp_path, "a")
    await stage.pushes.start()
    async with stage.pushes.weights:
        late = asyncio.ensure_future(stage.pushes.catch_up("b"))
        await settled(late)
        stage.replicas.addresses = ["a", "b"]
        await stage.pushes.push("step 1")
    await late
    assert stage.pushed == [(7, ("a",)), (8, ("a", "b"))]


async def test_generation_goes_on_during_a_push_unless_there_is_a_barrier(tmp_path):
    stage = Stage(tmp_path, "a")
    await stage.pushes.push("step 1")
    assert stage.replicas.events == [("push", 7, ("a",))]
    stage = Stage(tmp_path, "a", barrier=True)
    await stage.pushes.push("step 1")
    assert stage.replicas.events == [PauseMode.DRAIN, ("push", 7, ("a",)), "resume"]


async def test_what_is_held_goes_on_when_a_push_fails(tmp_path):
    stage = Stage(tmp_path, "a", barrier=True)
    stage.learner.refused = {"a"}
    with pytest.raises(FatalError, match="version 7 of the policy in 3 pushes"):
        await stage.pushes.push("step 1")
    assert stage.replicas.events[-1] == "resume"
    assert stage.pushes.policy_version == 6


async def test_nobody_to_push_to(tmp_path):
    with pytest.raises(UnavailableError):
        await Stage(tmp_path).pushes.push("step 1")

"""Pushes of real learners to real replicas, with everything that may die, stop, err or collide.

Each case is played QUARTET_FAULT_ROUNDS times. In every round completions are under way, and all of
them, before, during and after, must be of weights that were allowed, and whole.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from quartet.clients import RolloutClient
from quartet.types import ReplicaState
from tests.integration.push_faults.served import check_served
from tests.integration.push_faults.stage import FREE_WITHIN, SLACK, Stage

ROUNDS = int(os.environ.get("QUARTET_FAULT_ROUNDS", "1"))
DEADLINE = {"stop": 3.0}
"""Seconds given to each wait of a push. A death is known before its deadline, so that is long."""
LONG_DEADLINE = 10.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
]

every_round = pytest.mark.parametrize("number", range(ROUNDS), ids="round{}".format)


@pytest.fixture(scope="module")
def stage(request, tmp_path_factory):
    made = Stage(tmp_path_factory.mktemp("faults"))
    try:
        asyncio.run(asyncio.wait_for(made.open(), 800))
        yield made
    finally:
        made.nursery.end()
    terminal = request.config.pluginmanager.get_plugin("terminalreporter")
    for case, holds in made.holds.items():
        terminal.write_line(
            f"{case}: {len(holds)} rounds, learner held {max(holds):.2f} s at the longest"
        )


# What happens, where, at which index; the phase that is named; whether the other replica gets
# the push.
AT_ONE_REPLICA = [
    ("kill", "prepare", 0, "prepare", True),
    ("kill", "joined", 0, "prepare", True),
    ("kill", "bucket", 0, "receive", False),
    ("kill", "bucket", 1, "receive", False),
    ("kill", "commit", 0, "commit", True),
    ("kill", "tensor", 20, "commit", True),
    ("stop", "prepare", 0, "prepare", True),
    ("stop", "joined", 0, "prepare", True),
    ("stop", "bucket", 0, "receive", False),
    ("stop", "bucket", 1, "receive", False),
    ("stop", "commit", 0, "commit", True),
    ("stop", "tensor", 20, "commit", True),
    ("error", "tensor", 20, "commit", True),
    ("flip", "digest", 1, "receive", True),
]


@every_round
@pytest.mark.parametrize(
    ("do", "at", "index", "phase", "other_takes"),
    AT_ONE_REPLICA,
    ids=[f"{do}-at-{at}-{index}" for do, at, index, *_ in AT_ONE_REPLICA],
)
async def test_a_fault_of_one_replica(stage, number, do, at, index, phase, other_takes):
    other, victim = stage.replicas
    deadline = DEADLINE.get(do, LONG_DEADLINE)
    async with stage.round():
        old, learner = stage.version, stage.turn()
        new = stage.new_version(learner)
        victim.arm(at, index, do)
        outcome = await stage.push(learner, new, group_timeout=deadline)
        hold = outcome.ended - await victim.fired()
        if phase == "prepare" and outcome.result is not None:
            hold = outcome.result.prepare_seconds  # then comes the push to the other one
        stage.note(f"{do} at {at} {index}", hold)

        # The learner is free in time, for a death before its deadline, and says whose fault it was.
        assert hold < deadline + (SLACK if do == "kill" else FREE_WITHIN), outcome
        committed, told = outcome.of(victim.address)
        assert not committed
        assert f"{victim.address}: {phase}: " in told
        assert outcome.of(other.address)[0] is other_takes, outcome

        # Everybody who lives serves one of the two versions.
        await check_served(other.address, {new if other_takes else old}, stage.models)
        if do == "kill":
            victim = await stage.restart(victim)
            await check_served(victim.address, {0}, stage.models)
        elif do == "error":
            async with RolloutClient(victim.address) as client:
                assert (await client.get_info()).state is ReplicaState.STALE
        else:
            victim.signal(signal.SIGCONT)
            allowed = {old, new} if phase == "commit" else {old}
            await check_served(victim.address, allowed, stage.models)
        await stage.push_to_all(learner)


@every_round
async def test_a_learner_killed_in_the_middle_of_a_bucket(stage, number):
    """A replica that stands still holds the learner inside the broadcast until it is killed."""
    replicas = stage.replicas
    async with stage.round():
        old, learner = stage.version, stage.turn()
        replicas[1].arm("bucket", 1, "stop")
        pushing = asyncio.ensure_future(stage.push(learner, stage.new_version(learner)))
        await replicas[1].fired()
        stage.learners[learner].signal(signal.SIGKILL)
        outcome = await pushing
        assert outcome.result is None
        assert stage.learners[learner].address in outcome.error
        replicas[1].signal(signal.SIGCONT)
        for replica in replicas:
            await check_served(replica.address, {old}, stage.models)
        await stage.restart_learner(learner)
        await stage.push_to_all(learner)


@every_round
async def test_a_learner_killed_before_all_have_committed(stage, number):
    """Some serve the new version and some the old, until the next push."""
    first, second = stage.replicas
    async with stage.round():
        old, learner = stage.version, stage.turn()
        new = stage.new_version(learner)
        second.arm("commit", 0, "stop")
        pushing = asyncio.ensure_future(stage.push(learner, new))
        await second.fired()
        stage.learners[learner].signal(signal.SIGKILL)
        assert (await pushing).result is None
        second.signal(signal.SIGCONT)
        for replica in (first, second):
            await check_served(replica.address, {old, new}, stage.models)
        await stage.restart_learner(learner)
        await stage.push_to_all(learner)


@every_round
async def test_a_push_that_begins_in_the_middle_of_another(stage, number):
    """Two learners: the later epoch wins, and the first is told by whom it was lost."""
    replicas = stage.replicas
    async with stage.round():
        first, second = stage.turn(), stage.turn()
        versions = [stage.new_version(first), stage.new_version(second)]
        replicas[1].arm("bucket entry", 1, "hold")
        pushing = asyncio.ensure_future(stage.push(first, versions[0], group_timeout=LONG_DEADLINE))
        began = await replicas[1].fired()
        winner = await stage.push(second, versions[1])
        assert all(winner.of(replica.address)[0] for replica in replicas), winner
        loser = await pushing
        hold = loser.ended - began
        stage.note("a second push at bucket 1", hold)
        assert hold < LONG_DEADLINE + FREE_WITHIN
        assert loser.result is None
        assert all(f"{replica.address}: receive: " in loser.error for replica in replicas)
        replicas[1].go()
        for replica in replicas:
            await check_served(replica.address, {versions[1]}, stage.models)
        await stage.push_to_all(stage.turn())


@every_round
async def test_two_pushes_that_begin_together(stage, number):
    """Whoever wins where: what a learner says of a replica is what the replica serves."""
    replicas = stage.replicas
    async with stage.round():
        old = stage.version
        versions = [stage.new_version(learner) for learner in (0, 1)]
        began = time.monotonic()
        outcomes = await asyncio.gather(
            *(stage.push(n, v, group_timeout=5.0) for n, v in enumerate(versions))
        )
        stage.note("two pushes together", max(o.ended for o in outcomes) - began)
        for replica in replicas:
            took = {
                v
                for v, outcome in zip(versions, outcomes, strict=True)
                if outcome.of(replica.address)[0]
            }
            await check_served(replica.address, took or {old}, stage.models)
            for committed, told in (outcome.of(replica.address) for outcome in outcomes):
                assert committed or f"{replica.address}: " in told
        await stage.push_to_all(stage.turn())


@every_round
async def test_a_replica_added_in_the_middle_of_a_push(stage, number):
    first, second = stage.replicas
    async with stage.round():
        learner = stage.turn()
        new = stage.new_version(learner)
        second.arm("bucket entry", 1, "hold")
        pushing = asyncio.ensure_future(stage.push(learner, new))
        await second.fired()
        third = await stage.add_replica()
        await check_served(third.address, {0}, stage.models)
        joining = asyncio.ensure_future(stage.push(learner, new, to=[third]))
        second.go()
        for outcome, replicas in ((await pushing, (first, second)), (await joining, (third,))):
            assert all(outcome.of(replica.address)[0] for replica in replicas), outcome
        for replica in (first, second, third):
            await check_served(replica.address, {new}, stage.models)
        stage.replicas = [first, second, third]
        await stage.push_to_all(learner)
        stage.replicas = [first, second]
        third.signal(signal.SIGTERM)
        await asyncio.to_thread(third.wait_dead, 20)

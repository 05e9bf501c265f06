"""What Score means: once a request_id, failures typed and counted, INFRA for all fails the call."""

import asyncio

import pytest
from quartet_reward.scorer import Job, ScorerTraits
from quartet_reward.server import RewardService

from quartet.clients import RewardClient
from quartet.errors import StateError, UnavailableError
from quartet.obs.metrics import REGISTRY
from quartet.testing.loopback import loopback
from quartet.types import Failure, Reward, ScoreItem


def make_items(*labels):
    return [
        ScoreItem(sample_id=f"s{i}", prompt="p", query=f"p{label}", label=label)
        for i, label in enumerate(labels)
    ]


class ScriptedScorer:
    """The label is the outcome: a number, or the class of a failure."""

    def __init__(self, **traits):
        self.traits = ScorerTraits(kind="scripted", digest="d1", **traits)
        self.scored = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.is_asleep = self.is_stopped = False

    async def start(self):
        return self.traits

    async def prepare(self, items, tokenizer_fingerprint):
        return [
            Failure(error_class="DATA", reason="UNREADABLE", message="cannot be read")
            if item.label == "unreadable"
            else Job(item=item)
            for item in items
        ]

    async def score(self, jobs):
        self.scored += [job.item.sample_id for job in jobs]
        await self.gate.wait()
        return [
            Failure(error_class=job.item.label, reason="TOLD_TO", message="told to")
            if isinstance(job.item.label, str)
            else Reward(reward=job.item.label, score=0.0)
            for job in jobs
        ]

    async def sleep(self):
        self.is_asleep = True

    async def wake(self):
        self.is_asleep = False

    async def stop(self):
        self.is_stopped = True


@pytest.fixture
async def scorer():
    return ScriptedScorer(max_batches=2)


@pytest.fixture
async def client(scorer):
    async with loopback(RewardService(scorer)) as address, RewardClient(address) as client:
        yield client
    assert scorer.is_stopped


def metric(name, **labels):
    return REGISTRY.get_sample_value(name, labels) or 0.0


async def test_failures_stand_in_their_place_and_name_the_replica(client):
    batch = await client.score(request_id="r", items=make_items(1.5, "unreadable", "DATA", 2.5))
    info = await client.get_info()
    assert [r.outcome.reward for r in batch.results[::3]] == [1.5, 2.5]
    assert [r.outcome.reason for r in batch.results[1:3]] == ["UNREADABLE", "TOLD_TO"]
    assert {r.outcome.replica for r in batch.results[1:3]} == {batch.replica} == {info.info.replica}
    assert batch.digest == info.info.digest == "d1"


async def test_a_repeat_is_not_scored_again(client, scorer):
    first = await client.score(request_id="r", items=make_items(1.0, 2.0))
    again = await client.score(request_id="r", items=make_items(1.0, 2.0))
    other = await client.score(request_id="q", items=make_items(1.0, 2.0))
    assert first == again == other
    assert scorer.scored == ["s0", "s1"] * 2


async def test_repeats_under_way_join(client, scorer):
    scorer.gate.clear()
    calls = [
        asyncio.create_task(client.score(request_id="r", items=make_items(1.0))) for _ in range(3)
    ]
    async with asyncio.timeout(5):
        while client.in_flight < 3 or not scorer.scored:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    scorer.gate.set()
    first, *others = await asyncio.gather(*calls)
    assert others == [first, first]
    assert scorer.scored == ["s0"]


async def test_machinery_that_fails_for_all_fails_the_call_and_may_be_tried_again(client, scorer):
    no_retry = RewardClient(client.address, retry=False)
    with pytest.raises(UnavailableError, match="told to") as caught:
        await no_retry.score(request_id="r", items=make_items("INFRA", "INFRA"))
    await no_retry.close()
    assert caught.value.info.reason == "TOLD_TO"
    batch = await client.score(request_id="r", items=make_items(1.0, 2.0))
    assert [r.outcome.reward for r in batch.results] == [1.0, 2.0]


async def test_machinery_that_fails_for_some_is_a_failure_of_theirs(client):
    batch = await client.score(request_id="r", items=make_items("INFRA", 1.0))
    assert batch.results[0].outcome.error_class == "INFRA"
    assert batch.results[1].outcome.reward == 1.0


async def test_outcomes_are_counted(client):
    names = ("quartet_reward_scored_samples_total", "quartet_reward_failed_samples_total")
    before = metric(names[0], outcome="reward"), metric(names[1], reason="TOLD_TO")
    await client.score(request_id="r", items=make_items(1.0, "DATA", 2.0))
    after = metric(names[0], outcome="reward"), metric(names[1], reason="TOLD_TO")
    assert (after[0] - before[0], after[1] - before[1]) == (2.0, 1.0)


async def test_the_queue_is_shown(client, scorer):
    scorer.gate.clear()
    call = asyncio.create_task(client.score(request_id="r", items=make_items(1, 2, 3, 4, 5)))
    async with asyncio.timeout(5):
        while len(scorer.scored) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert metric("quartet_queue_depth", queue="reward") == 3.0
    scorer.gate.set()
    await call
    assert metric("quartet_queue_depth", queue="reward") == 0.0


async def test_sleep_waits_for_what_is_under_way_and_refuses_the_rest(client, scorer):
    scorer.gate.clear()
    running = asyncio.create_task(client.score(request_id="r", items=make_items(1.0)))
    async with asyncio.timeout(5):
        while not scorer.scored:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    sleeping = asyncio.create_task(client.sleep())
    async with asyncio.timeout(5):
        while True:
            try:
                await client.score(request_id="q", items=make_items(1.0), timeout=0.05)
            except StateError:
                break
            except TimeoutError:
                continue
    assert not scorer.is_asleep
    scorer.gate.set()
    assert (await running).results[0].outcome.reward == 1.0
    await sleeping
    assert scorer.is_asleep
    await client.wake()
    assert not scorer.is_asleep
    assert (await client.score(request_id="q2", items=make_items(1.0))).results


async def test_a_crowd_loses_nothing(client, scorer):
    """More calls at once than client and server admit: all are answered, each with its own."""
    numbers = [float(n) for n in range(600)]
    batches = await asyncio.gather(
        *(client.score(request_id=f"r{n}", items=make_items(n)) for n in numbers)
    )
    assert [batch.results[0].outcome.reward for batch in batches] == numbers
    assert len(scorer.scored) == len(numbers)

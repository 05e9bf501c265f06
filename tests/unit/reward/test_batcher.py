"""Micro-batching across callers."""

import asyncio

import pytest
from quartet_reward.batcher import Batcher
from quartet_reward.scorer import Job

from quartet.errors import DataError, InfraError, UnavailableError
from quartet.types import Failure, Reward, ScoreItem


def job(name, length=1):
    item = ScoreItem(sample_id=name, prompt="", query=name)
    return Job(item=item, token_ids=tuple(range(length)))


def reward_of(job):
    return Reward(reward=float(job.cost), score=0.0)


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - what is waited for offers no event
            await asyncio.sleep(0)


class Recorder:
    """A scorer that remembers its batches and can be held."""

    def __init__(self):
        self.batches = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def score(self, jobs):
        self.batches.append([job.item.sample_id for job in jobs])
        await self.gate.wait()
        return [reward_of(job) for job in jobs]


async def test_an_idle_scorer_starts_at_once_and_order_is_kept():
    recorder = Recorder()
    batcher = Batcher(recorder.score, max_items=2)
    outcomes = await batcher.submit([job("a", 3), job("b", 1), job("c", 2)])
    assert [o.reward for o in outcomes] == [3.0, 1.0, 2.0]
    # "a" is the oldest; "c" is nearer to it in length than "b".
    assert recorder.batches == [["a", "c"], ["b"]]


async def test_calls_share_batches():
    recorder = Recorder()
    batcher = Batcher(recorder.score, max_items=8)
    await asyncio.gather(*(batcher.submit([job(name)]) for name in "abc"))
    assert recorder.batches == [["a", "b", "c"]]


async def test_items_gather_while_the_scorer_is_busy():
    recorder = Recorder()
    recorder.gate.clear()
    batcher = Batcher(recorder.score, max_items=8)
    first = asyncio.create_task(batcher.submit([job("a")]))
    await until(lambda: recorder.batches)
    others = [asyncio.create_task(batcher.submit([job(name)])) for name in "bc"]
    await until(lambda: batcher.num_waiting == 2)
    assert recorder.batches == [["a"]]
    recorder.gate.set()
    await asyncio.gather(first, *others)
    assert recorder.batches == [["a"], ["b", "c"]]


async def test_the_padded_cost_is_bounded_and_a_huge_item_goes_alone():
    recorder = Recorder()
    batcher = Batcher(recorder.score, max_items=100, max_cost=10)
    names = {"huge": 50, "a": 5, "b": 5, "c": 4, "d": 1}
    outcomes = await batcher.submit([job(name, n) for name, n in names.items()])
    assert [o.reward for o in outcomes] == [50, 5, 5, 4, 1]
    for batch in recorder.batches:
        assert len(batch) == 1 or max(names[n] for n in batch) * len(batch) <= 10
    assert ["huge"] in recorder.batches
    assert ["a", "b"] in recorder.batches


async def test_as_many_batches_at_once_as_allowed():
    recorder = Recorder()
    recorder.gate.clear()
    batcher = Batcher(recorder.score, max_batches=2)
    call = asyncio.create_task(batcher.submit([job(name) for name in "abc"]))
    await until(lambda: len(recorder.batches) == 2)
    assert batcher.num_waiting == 1
    recorder.gate.set()
    await call
    assert recorder.batches == [["a"], ["b"], ["c"]]


async def test_a_bad_item_is_found_and_its_batch_goes_on():
    async def score(jobs):
        if any(job.item.sample_id == "bad" for job in jobs):
            raise DataError("cannot score this", reason="SOME_REASON")
        return [reward_of(job) for job in jobs]

    outcomes = await Batcher(score, max_items=3).submit([job("a"), job("bad"), job("c")])
    assert isinstance(outcomes[0], Reward)
    assert outcomes[1] == Failure(
        error_class="DATA", reason="SOME_REASON", message="cannot score this"
    )
    assert isinstance(outcomes[2], Reward)


async def test_machinery_failures_are_not_tried_item_by_item():
    calls = []

    async def score(jobs):
        calls.append(len(jobs))
        raise InfraError("no", reason="BROKEN")

    outcomes = await Batcher(score, max_items=3).submit([job("a"), job("b")])
    assert calls == [2]
    assert [o.error_class for o in outcomes] == ["INFRA", "INFRA"]


@pytest.mark.parametrize("bug", [ValueError("bug"), None])
async def test_a_bug_in_a_scorer_is_a_failure_and_never_a_hang(bug):
    async def score(jobs):
        if bug is not None:
            raise bug
        return []  # too few outcomes

    [outcome] = await Batcher(score).submit([job("a")])
    assert (outcome.error_class, outcome.reason) == ("INFRA", "SCORER_FAILED")


async def test_a_cancelled_call_leaves_the_queue():
    recorder = Recorder()
    recorder.gate.clear()
    batcher = Batcher(recorder.score)
    running = asyncio.create_task(batcher.submit([job("a")]))
    await until(lambda: recorder.batches)
    given_up = asyncio.create_task(batcher.submit([job("b"), job("c")]))
    await until(lambda: batcher.num_waiting)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    recorder.gate.set()
    await running
    await batcher.drain()
    assert recorder.batches == [["a"]]


async def test_a_full_queue_refuses():
    recorder = Recorder()
    recorder.gate.clear()
    batcher = Batcher(recorder.score, max_waiting=2)
    call = asyncio.create_task(batcher.submit([job("a"), job("b")]))
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError) as caught:
        await batcher.submit([job("c")])
    assert caught.value.info.reason == "QUEUE_FULL"
    recorder.gate.set()
    await call

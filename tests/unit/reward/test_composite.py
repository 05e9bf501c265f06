"""Sums of scorers: weights, names, failures, batches of their own, and the math verifier."""

import asyncio
from dataclasses import replace

import pytest
from quartet_reward.scorer import Job, ScorerTraits
from quartet_reward.scorers import make_scorer
from quartet_reward.scorers.composite import CompositeScorer, Part
from quartet_reward.server import RewardService

from quartet.clients import RewardClient
from quartet.config import RewardServeConfig
from quartet.testing.loopback import loopback
from quartet.types import Failure, Reward, ScoreItem


def make_item(name="s0", completion="", label=1.0):
    return ScoreItem(sample_id=name, prompt="ask:", query=f"ask:{completion}", label=label)


class Fixed:
    """Gives factor * label, or a failure for the label None."""

    def __init__(self, factor, *, gate=None, **traits):
        self.factor = factor
        self.gate = gate
        self.traits = ScorerTraits(**{"kind": "fixed", "digest": f"d{factor}", **traits})
        self.batches = []
        self.calls = []

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
        self.batches.append([job.item.sample_id for job in jobs])
        if self.gate is not None:
            await self.gate.wait()
        return [
            Failure(error_class="INFRA", reason="GONE", message="nobody there")
            if job.item.label is None
            else Reward(
                reward=self.factor * job.item.label,
                score=job.item.label,
                extra_logs={"seen": self.factor},
            )
            for job in jobs
        ]

    async def sleep(self):
        self.calls.append("sleep")

    async def wake(self):
        self.calls.append("wake")

    async def stop(self):
        self.calls.append("stop")


def composite(**parts):
    return CompositeScorer(
        [Part(name=n, weight=w, scorer=scorer) for n, (w, scorer) in parts.items()]
    )


async def score(scorer, *items):
    """As the service does: one call of the room."""
    async with loopback(RewardService(scorer)) as address, RewardClient(address) as client:
        return (await client.score(request_id="r", items=items)).results


async def test_rewards_and_scores_are_weighted_sums_and_parts_are_logged():
    scorer = composite(a=(0.5, Fixed(2.0)), b=(-1.0, Fixed(3.0)))
    (result,) = await score(scorer, make_item(label=4.0))
    assert result.outcome.reward == 0.5 * 8 - 12
    assert result.outcome.score == 0.5 * 4 - 4
    assert result.outcome.extra_logs == {"reward_a": 8.0, "reward_b": 12.0, "seen": 3.0}


async def test_a_sample_has_a_reward_only_when_every_part_gave_one():
    scorer = composite(a=(1.0, Fixed(1.0)), b=(1.0, Fixed(1.0)))
    results = await score(
        scorer,
        make_item("good"),
        make_item("lost", label=None),
        make_item("odd", label="unreadable"),
    )
    assert results[0].outcome.reward == 2.0
    assert (results[1].outcome.error_class, results[1].outcome.message) == (
        "INFRA",
        "a: nobody there",
    )
    assert (results[2].outcome.reason, results[2].outcome.message) == (
        "UNREADABLE",
        "a: cannot be read",
    )


async def test_each_part_keeps_batches_of_its_own():
    gate = asyncio.Event()
    wide, single = Fixed(1.0, gate=gate, max_batch_items=8), Fixed(2.0, max_batches=8)
    scorer = composite(wide=(1.0, wide), single=(1.0, single))
    await scorer.start()
    items = [make_item(f"s{i}") for i in range(5)]
    prepared = await scorer.prepare(items, "")
    tasks = [asyncio.create_task(scorer.score([job])) for job in prepared]
    async with asyncio.timeout(5):
        while len(single.batches) < 5:  # noqa: ASYNC110 - what is waited for offers no event
            await asyncio.sleep(0)
    gate.set()
    results = [outcome.reward for (outcome,) in await asyncio.gather(*tasks)]
    assert results == [3.0] * 5
    assert sorted(single.batches) == [[f"s{i}"] for i in range(5)]
    assert max(map(len, wide.batches)) > 1


async def test_a_sum_beyond_belief_is_a_failure_like_any_other():
    (result,) = await score(composite(a=(1e6, Fixed(1e3))), make_item())
    assert result.outcome.reason == "OUT_OF_RANGE"


async def test_traits_are_those_that_hold_for_all_parts():
    one = Fixed(1.0, kind="model", tokenizer_fingerprint="f", max_sequence_length=64)
    other = Fixed(2.0, max_sequence_length=32)
    same = await composite(a=(1.0, one), b=(1.0, other)).start()
    assert same.tokenizer_fingerprint == "f"
    assert same.max_sequence_length == 32
    assert not same.normalizes
    foreign = Fixed(1.0, kind="model", tokenizer_fingerprint="g")
    assert (await composite(a=(1.0, one), b=(1.0, foreign)).start()).tokenizer_fingerprint == ""
    heavier = await composite(a=(2.0, one), b=(1.0, other)).start()
    assert same.digest
    assert heavier.digest != same.digest
    unknown = Fixed(1.0, digest="")
    assert (await composite(a=(1.0, one), b=(1.0, unknown)).start()).digest == ""


async def test_all_parts_sleep_wake_and_stop():
    parts = [Fixed(1.0), Fixed(2.0)]
    scorer = composite(a=(1.0, parts[0]), b=(1.0, parts[1]))
    async with loopback(RewardService(scorer)) as address, RewardClient(address) as client:
        await client.sleep()
        await client.wake()
    assert [part.calls for part in parts] == [["sleep", "wake", "stop"]] * 2


FORMAT = """
    def reward_func(queries, prompts, labels, **kwargs):
        return {"rewards": [float(q.endswith(".")) for q in queries]}
"""


def config_of(*parts):
    config = RewardServeConfig()
    return replace(config, reward=replace(config.reward, parts=parts, num_workers=1))


async def test_math_beside_a_file(write_reward_file):
    path = write_reward_file(FORMAT, "format.py")
    scorer = make_scorer(config_of("0.8:math", f"0.2:{path}"))
    right, wrong, none = await score(
        scorer,
        make_item("right", r"so it is $\boxed{\frac{1}{2}}$.", label="0.5"),
        make_item("wrong", "so it is 3", label="0.5"),
        make_item("none", "I do not know.", label="0.5"),
    )
    assert right.outcome.reward == 1.0
    assert right.outcome.extra_logs == {
        "answer_found": 1.0,
        "reward_math": 1.0,
        "reward_format": 1.0,
    }
    assert wrong.outcome.reward == 0.0
    assert none.outcome.reward == pytest.approx(0.2)
    assert none.outcome.extra_logs["answer_found"] == 0.0


async def test_math_without_a_label_is_a_failure_and_no_0():
    (result,) = await score(make_scorer(config_of("1:math")), make_item(label=""))
    assert isinstance(result.outcome, Failure)
    assert "data.label_key" in result.outcome.message

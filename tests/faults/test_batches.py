"""Faults of batching: samples left out, repeated, trained late or in an order nobody chose."""

from collections import Counter

import pytest

from quartet.config import PpoConfig, RmConfig
from quartet.config.load import build
from quartet.config.validate import problems
from quartet.trainer.offline import Lessons
from quartet.trainer.rm import batch_maker, evaluate, pairwise_loss
from quartet.trainer.schedule import SeededBatches
from quartet.types import Head
from tests.faults.loops import pairs, play_offline, play_ppo, trained_names
from tests.unit.trainer.players import Cast, FakeTrainee, ppo_config

SIZES = [
    # prompts, prompts of a rollout, samples of a prompt, samples of a step, passes
    (8, 4, 2, 3, 1),
    (7, 4, 2, 8, 2),
    (5, 5, 3, 4, 3),
    (9, 2, 2, 4, 1),
]


@pytest.mark.parametrize(("prompts", "rollout", "n", "batch", "epochs"), SIZES)
async def test_fault_03_no_sample_is_left_out(tmp_path, prompts, rollout, n, batch, epochs):
    """Sizes that do not divide one another cost no sample, and the ledger says so."""
    cast = Cast()
    config = ppo_config(
        rollout={"batch_size": rollout, "n_samples_per_prompt": n, "max_new_tokens": 8},
        train={"batch_size": batch, "seed": 7, "max_epochs": epochs},
    )
    counts, _ = await play_ppo(cast, config, tmp_path, num_prompts=prompts)
    times = Counter(name for step in trained_names(cast.policy) for name in step)
    assert times == {f"0/p{i}/{j}": epochs for i in range(prompts) for j in range(n)}
    assert counts == {"trained": prompts * n}
    assert sum(m["num_samples_trained"] for m in cast.metrics) == prompts * n


def test_fault_04_an_optimizer_batch_above_the_rollout_is_refused():
    """Not accepted and then never stepped: refused before the start, with the number to set."""
    config = build(
        PpoConfig,
        {
            "actor.model_name_or_path": "org/policy",
            "reward.model_name_or_path": "org/reward",
            "data.prompt_dataset": "org/prompts",
            "rollout.batch_size": 4,
            "rollout.n_samples_per_prompt": 2,
            "train.batch_size": 9,
        },
        {},
    )
    (error,) = problems(config)
    assert error.info.field == "train.batch_size"
    assert "set --train.batch_size 8 or less" in str(error.info.remedy)


async def test_fault_04_every_rollout_takes_a_step(tmp_path):
    """A small last rollout is smaller than an optimizer batch, and is trained all the same."""
    cast = Cast()
    await play_ppo(cast, ppo_config(train={"batch_size": 8, "seed": 7}), tmp_path, num_prompts=5)
    assert [m["actor_optimizer_steps"] for m in cast.metrics] == [1.0, 1.0]
    assert [len(step) for step in trained_names(cast.policy)] == [8, 2]


async def test_fault_05_frozen_actor_keeps_no_stale_batches(tmp_path):
    """After two rollouts of critic warm-up the policy first trains on the third one's samples."""
    cast = Cast(critic=FakeTrainee(head="value"))
    config = ppo_config(algo={"advantage": {"estimator": "gae"}}, critic={"freezing_steps": 2})
    await play_ppo(cast, config, tmp_path, num_prompts=12)
    rollouts = [cast.sampler.log[start : start + 4] for start in (0, 4, 8)]
    third = {name for request in rollouts[2] for g in request.groups for name in g.sample_ids}
    assert {name for step in trained_names(cast.policy) for name in step} == third
    assert len(trained_names(cast.policy)) == 2
    assert len(trained_names(cast.critic)) == 6
    assert ["actor_lr" in m for m in cast.metrics] == [False, False, True]


async def test_fault_10_the_order_of_prompts_follows_the_seed(tmp_path):
    async def order(seed, name):
        cast = Cast()
        await play_ppo(cast, ppo_config(train={"batch_size": 4, "seed": seed}), tmp_path / name)
        return [request.groups[0].group_id for request in cast.sampler.log]

    one = await order(1, "one")
    assert one == await order(1, "again")
    assert one != await order(2, "two")
    assert sorted(one) == [f"0/p{i}" for i in range(8)]


@pytest.mark.parametrize("size", [2, 3, 4, 7, 9])
def test_fault_11_a_cursor_anywhere_gives_exactly_the_rest(size):
    """Also on the small last batch of an episode, where the incumbent begins the episode again."""
    batches = SeededBatches(list(range(7)), batch_size=size, seed=3)
    everything = list(batches.run(3))
    for done in range(len(everything) + 1):
        assert list(batches.run(3, skip=done)) == everything[done:]


async def test_fault_23_the_schedule_spans_the_steps_there_are(tmp_path):
    """Five pairs in batches of two, three times: nine steps, and the schedule knows of nine."""
    config = build(RmConfig, {}, {})
    lessons = Lessons(
        head=Head.REWARD,
        rows=pairs(5),
        to_samples=batch_maker(config),
        loss=pairwise_loss(config),
        tokenizer_fingerprint="f" * 64,
        evaluate=lambda trainee, rows: evaluate(config, trainee, rows),
    )
    trainee = FakeTrainee(head="reward")
    flags = {"train.batch_size": 2, "train.max_epochs": 3}
    await play_offline(Cast(), RmConfig, flags, lessons, trainee, tmp_path)
    (_, spec) = trainee.of("start")[0]
    steps = trained_names(trainee)
    assert spec.schedule.total_steps == len(steps) == 9
    assert [len(step) for step in steps] == [4, 4, 2] * 3
    assert set(Counter(name for step in steps for name in step).values()) == {3}

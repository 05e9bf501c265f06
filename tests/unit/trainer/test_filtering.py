"""Dynamic filtering on fake players: what is replaced, when it ends, and that resume is exact."""

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet.errors import FatalError, InfraError
from quartet.trainer.drops import Drops
from quartet.trainer.filtering import PromptCursor
from quartet.trainer.ppo_loop import PpoLoop
from quartet.trainer.schedule import SeededBatches
from quartet.types import Failure, Reward
from tests.unit.trainer.players import Cast, FakeTrainee, inputs, ppo_config, prompts

BROKEN = Failure(error_class="DATA", reason="TIME_LIMIT", message="took too long")
SOLVED, HOPELESS, HALF, FLAT = (1.0, 1.0), (0.0, 0.0), (0.0, 1.0), (0.5, 0.5)


def config(**sections):
    algo = {"advantage": {"estimator": "group_norm"}, "dynamic_filtering_enable": True}
    sections = {"train": {"batch_size": 4, "seed": 7}} | sections
    return ppo_config(**sections | {"algo": algo | sections.get("algo", {})})


def new_cast(scores, **players):
    """Players whose prompts get the scores that are given by their number, the others HALF."""
    cast = Cast(**players)
    score = cast.judge.score

    async def by_prompt(request):
        batch = await score(request)
        results = []
        for result in batch.results:
            _, prompt, index = result.sample_id.split("/")
            if not isinstance(result.outcome, Failure):
                value = scores.get(int(prompt[1:]), HALF)[int(index)]
                # Rewards that differ in any case: filtering looks at scores.
                outcome = Reward(reward=value + int(index), score=value)
                result = replace(result, outcome=outcome)
            results.append(result)
        return replace(batch, results=tuple(results))

    cast.judge.score = by_prompt
    return cast


async def play(cast, chosen, folder, *, num_prompts=12):
    folder.mkdir(parents=True, exist_ok=True)
    run = cast.run(chosen, folder)
    try:
        await PpoLoop(chosen, run, inputs(num_prompts), cast.players).run()
        return await run.ledger.counts(), await run.ledger.drop_reasons()
    finally:
        await run.ledger.close()
        run.progress.close()


def order(count, episode=0):
    """Numbers of the prompts in the order of their draw."""
    cursor = PromptCursor(prompts(count), seed=7, num_episodes=episode + 1)
    cursor.consumed = episode * count
    return [int(p.prompt_id[1:]) for p in cursor.draw(count).prompts]


def trained(cast):
    """Numbers of the prompts trained on, by step, without steps on which nothing was."""
    steps = [[] for _ in cast.metrics]
    pushes = 0
    for entry in cast.policy.log:
        if entry[0] == "push":
            pushes += 1
        if entry[0] == "train":
            names = [n for part in entry[2] for n in part.sequences.sample_ids]
            steps[pushes - 1] += [int(name.split("/")[1][1:]) for name in names]
    return [sorted(set(step)) for step in steps if step]


def numbers(cast):
    return [
        {k: v for k, v in metrics.items() if not k.startswith("timing/")}
        for metrics in cast.metrics
    ]


@pytest.mark.parametrize("deterministic", [False, True])
async def test_what_teaches_nothing_is_replaced_by_the_next_prompts(tmp_path, deterministic):
    drawn = order(12)
    # Of the first four two are useless, of the two that follow one, the next is good.
    scores = {drawn[0]: SOLVED, drawn[2]: FLAT, drawn[4]: HOPELESS}
    cast = new_cast(scores)
    train = {"batch_size": 4, "seed": 7, "full_determinism_enable": deterministic}
    counts, reasons = await play(cast, config(train=train), tmp_path)
    first = sorted(drawn[i] for i in (1, 3, 5, 6))
    assert trained(cast) == [first, sorted(drawn[7:11]), drawn[11:]]
    assert counts == {"trained": 18, "dropped": 6}
    assert reasons == {"filtered": 6}
    rates = [m["dynamic_filtering_pass_rate"] for m in cast.metrics]
    assert rates == [pytest.approx(100 * 4 / 7), 100.0, 100.0]
    assert cast.metrics[0]["dropped/filtered"] == 6
    assert "dropped/filtered" not in cast.metrics[1]


async def test_what_is_accepted_at_the_end_of_the_data_is_trained(tmp_path):
    drawn = order(6)
    cast = new_cast(dict.fromkeys(drawn[1:], SOLVED))
    counts, _ = await play(cast, config(), tmp_path, num_prompts=6)
    assert trained(cast) == [[drawn[0]]]
    assert counts == {"trained": 2, "dropped": 10}
    assert cast.metrics[0]["dynamic_filtering_pass_rate"] == pytest.approx(100 / 6)


@settings(max_examples=12, deadline=None)
@given(
    fates=st.lists(st.sampled_from([SOLVED, HOPELESS, HALF, HALF, FLAT]), min_size=1, max_size=9),
    batch=st.integers(1, 4),
    episodes=st.integers(1, 2),
)
def test_nothing_accepted_is_ever_thrown_away(fates, batch, episodes):
    """Whatever the scores: each prompt is drawn once a pass, and what teaches is trained once."""

    async def run(folder):
        cast = new_cast(dict(enumerate(fates)))
        train = {"batch_size": 1, "seed": 7, "num_episodes": episodes}
        rollout = {"batch_size": batch, "n_samples_per_prompt": 2, "max_new_tokens": 8}
        chosen = config(train=train, rollout=rollout)
        counts, _ = await play(cast, chosen, folder, num_prompts=len(fates))
        return cast, counts

    with TemporaryDirectory() as folder:
        cast, counts = asyncio.run(run(Path(folder)))
    good = [number for number, scores in enumerate(fates) if scores == HALF]
    assert sorted(itertools.chain(*trained(cast))) == sorted(good * episodes)
    total = 2 * episodes * len(fates)
    expected = {"trained": 2 * episodes * len(good), "dropped": total - 2 * episodes * len(good)}
    assert counts == {name: number for name, number in expected.items() if number}
    rates = [m["dynamic_filtering_pass_rate"] for m in cast.metrics]
    assert all(0.0 <= rate <= 100.0 for rate in rates)
    # No step but the last of a pass has fewer groups than it wanted.
    last = [m["episode"] for m in cast.metrics] + [float(episodes)]
    for step, metrics in enumerate(cast.metrics):
        if last[step] == last[step + 1]:
            assert metrics["rollout/num_samples"] == 2 * batch


async def test_an_episode_without_anything_to_learn_is_no_failure(tmp_path):
    cast = new_cast(dict.fromkeys(range(40), HOPELESS))
    counts, _ = await play(cast, config(), tmp_path, num_prompts=40)
    assert counts == {"dropped": 80}
    assert [m["dynamic_filtering_pass_rate"] for m in cast.metrics] == [0.0]
    assert cast.policy.of("train") == []


async def test_replacements_are_of_the_same_episode(tmp_path):
    drawn = order(5)
    cast = new_cast({drawn[4]: SOLVED})
    train = {"batch_size": 4, "seed": 7, "num_episodes": 2}
    counts, _ = await play(cast, config(train=train), tmp_path, num_prompts=5)
    assert [m["episode"] for m in cast.metrics] == [0.0, 0.0, 1.0]
    assert counts == {"trained": 16, "dropped": 4}
    second = order(5, episode=1)
    assert trained(cast) == [sorted(drawn[:4]), sorted(set(second) - {drawn[4]})]


async def test_the_order_of_answers_changes_nothing(tmp_path):
    drawn = order(12)
    scores = {drawn[i]: SOLVED for i in (0, 3, 5, 6)}
    rows = []
    for number, deterministic in enumerate((True, False)):
        cast = new_cast(scores, critic=FakeTrainee(head="value"))
        train = {"batch_size": 4, "seed": 7, "full_determinism_enable": deterministic}
        algo = {"advantage": {"estimator": "gae"}}
        await play(cast, config(train=train, algo=algo), tmp_path / str(number))
        rows.append(numbers(cast))
    assert rows[0] == rows[1]


async def test_what_is_filtered_is_not_evaluated(tmp_path):
    drawn = order(8)
    cast = new_cast({drawn[0]: FLAT})
    await play(cast, config(), tmp_path, num_prompts=8)
    evaluated = [name for _, chunks in cast.policy.of("forward") for c in chunks for name in c]
    assert len(evaluated) == len(set(evaluated)) == 14
    assert not any(name.startswith(f"0/p{drawn[0]}/") for name in evaluated)
    assert cast.reference is not None
    assert sorted(evaluated) == sorted(
        n for chunks in cast.reference.log for c in chunks for n in c
    )


async def test_the_incumbents_rule_and_another_range(tmp_path):
    drawn = order(4)
    scores = {drawn[0]: FLAT, drawn[1]: (0.0, 0.5), drawn[2]: (0.5, 1.0)}
    cast = new_cast(scores)
    algo = {"dynamic_filtering_mean_only": True, "dynamic_filtering_range": (0.25, 0.75)}
    await play(cast, config(algo=algo), tmp_path, num_prompts=4)
    # 0.25 and 0.75 themselves lie outside the open interval.
    assert trained(cast) == [sorted([drawn[0], drawn[3]])]


async def test_failures_are_no_filtering(tmp_path):
    drawn = order(8)
    cast = new_cast({})
    name = f"0/p{drawn[0]}"
    cast.judge.failures = {f"{name}/0": BROKEN}
    counts, reasons = await play(cast, config(), tmp_path, num_prompts=8)
    assert reasons == {"group_too_small": 1, "reward_time_limit": 1}
    assert counts == {"trained": 14, "dropped": 2}
    assert len(trained(cast)[0]) == 4


async def test_a_broken_scorer_ends_the_run_and_does_not_eat_the_data(tmp_path):
    cast = new_cast({})
    cast.judge.failures = {f"0/p{i}/{j}": BROKEN for i in range(40) for j in range(2)}
    with pytest.raises((FatalError, BaseExceptionGroup)):
        await play(cast, config(), tmp_path, num_prompts=40)
    assert sum(len(r.groups) for r in cast.sampler.log) == 4


def test_filtered_samples_raise_no_alarm_and_show_that_services_work():
    drops = Drops(limit=3)
    for _ in range(4):
        drops.drop("lost", "")
        drops.drop("lost", "")
        drops.set_aside("filtered", 5)
    assert drops.totals() == {"filtered": 20, "lost": 8}
    drops.set_aside("filtered", 0)
    drops.drop("lost", "")
    drops.drop("lost", "")
    with pytest.raises(FatalError):
        drops.drop("lost", "")


async def test_resume_after_any_step_is_exact(tmp_path):
    drawn = order(12)
    scores = {drawn[i]: SOLVED for i in (0, 2, 5, 9)}

    def settings(folder, **ckpt):
        ckpt = {"save_steps": 1, "path": str(folder / "ckpt"), "output_dir": "/exported"} | ckpt
        rollout = {"batch_size": 3, "n_samples_per_prompt": 2, "max_new_tokens": 8}
        return config(ckpt=ckpt, rollout=rollout)

    whole = new_cast(scores)
    await play(whole, settings(tmp_path / "whole"), tmp_path / "whole")
    assert len(whole.metrics) == 3
    for kill_at in (2, 3):
        folder = tmp_path / str(kill_at)
        killed = new_cast(scores)
        train = killed.policy.train

        async def dying(step, samples, *, killed=killed, train=train, kill_at=kill_at):
            if len(killed.policy.of("push")) == kill_at:
                raise InfraError("the machine is gone")
            return await train(step, samples)

        killed.policy.train = dying
        with pytest.raises(BaseExceptionGroup):
            await play(killed, settings(folder), folder)
        resumed = new_cast(scores)
        counts, _ = await play(resumed, settings(folder, load_enable=True), folder)
        assert numbers(killed) + numbers(resumed) == numbers(whole)
        assert counts == {"trained": 16, "dropped": 8}


@pytest.mark.parametrize(("size", "batch"), itertools.product((1, 5, 8), (1, 3, 8)))
def test_cursor_without_filter_goes_as_batches_do(size, batch):
    rows = prompts(size)
    cursor = PromptCursor(rows, seed=3, num_episodes=2)
    batches = list(SeededBatches(rows, batch_size=batch, seed=3).run(2))
    for expected in batches:
        draw = cursor.draw(batch)
        assert (draw.episode, draw.prompts) == (expected.epoch, expected.rows)
        assert draw.first == expected.index * batch
    assert cursor.draw(batch).prompts == ()


def test_cursor_goes_on_from_a_number_of_prompts():
    rows = prompts(7)
    whole = PromptCursor(rows, seed=3, num_episodes=3)
    drawn = [p for _ in range(21) for p in whole.draw(1).prompts]
    for consumed in range(22):
        later = PromptCursor(rows, seed=3, num_episodes=3, consumed=consumed)
        rest = []
        while part := later.draw(2).prompts:
            rest += part
        assert rest == drawn[consumed:]

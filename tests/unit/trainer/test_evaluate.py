"""Evaluation on fake players: when, with which weights and seeds, and what the numbers mean."""

from dataclasses import replace

import pytest

from quartet.errors import DataError, FatalError, InfraError
from quartet.trainer.evaluate import evaluation_metrics, metric_names
from quartet.trainer.experience import Group
from quartet.trainer.ppo_loop import PpoLoop
from quartet.types import Failure, FinishReason, Reward
from tests.unit.trainer.players import Cast, inputs, ppo_config, prompts

BROKEN = Failure(error_class="DATA", reason="TIME_LIMIT", message="took too long")


def config(**sections):
    defaults = {
        "eval": {"steps": 1, "temperature": 0.25, "n_samples_per_prompt": 3},
        "ckpt": {"output_dir": "/exported", "best_metric_key": "none"},
    }
    return ppo_config(**defaults | sections)


def two_sources(count=4):
    """Prompts of two sources; the first two have the same text."""
    made = prompts(count)
    return [
        replace(p, prompt_id=f"e{i}", datasource=("math", "code")[i % 2], text=f"text {i // 2}")
        for i, p in enumerate(made)
    ]


async def play(cast, settings, folder, *, eval_prompts=None):
    folder.mkdir(parents=True, exist_ok=True)
    run = cast.run(settings, folder)
    given = replace(inputs(8), eval_prompts=two_sources() if eval_prompts is None else eval_prompts)
    try:
        await PpoLoop(settings, run, given, cast.players).run()
        return run, await run.ledger.counts()
    finally:
        await run.ledger.close()
        run.progress.close()


def evals(cast):
    return {step: metrics for kind, step, metrics in cast.sink.rows if kind == "eval"}


def asked(cast):
    """Generate requests of evaluations."""
    return [r for r in cast.sampler.log if r.groups[0].group_id.startswith("eval/")]


async def test_rows_of_their_own_on_the_weights_just_pushed(tmp_path):
    cast = Cast()
    run, counts = await play(cast, config(), tmp_path)
    assert [(kind, step) for kind, step, _ in cast.sink.rows] == [
        ("train", 1),
        ("eval", 1),
        ("train", 2),
        ("eval", 2),
    ]
    # Version 1 is that of the start.
    assert [r.min_policy_version for r in asked(cast)] == [2] * 4 + [3] * 4
    assert [row["policy_version"] for row in evals(cast).values()] == [2.0, 3.0]
    assert counts == {"trained": 16}
    assert run.summary["eval"]["step"] == 2
    assert run.summary["eval"]["metrics"] == evals(cast)[2]


async def test_each_nth_step_and_not_at_all(tmp_path):
    for every, steps in ((2, [2]), (3, []), (-1, [])):
        cast = Cast()
        await play(cast, config(eval={"steps": every}), tmp_path / str(every))
        assert list(evals(cast)) == steps
        assert bool(asked(cast)) == bool(steps)


async def test_its_own_temperature_and_number_of_samples_the_rest_as_in_training(tmp_path):
    cast = Cast()
    rollout = {"batch_size": 8, "max_new_tokens": 1024, "top_p": 0.9, "n_samples_per_prompt": 2}
    await play(cast, config(rollout=rollout), tmp_path)
    training = cast.sampler.log[0].sampling
    evaluation = asked(cast)[0]
    assert evaluation.sampling == replace(training, temperature=0.25)
    assert training.temperature == 1.0
    assert evaluation.sampling.top_p == 0.9
    assert [g.num_samples for g in evaluation.groups] == [3]


async def test_seeds_are_the_same_at_every_evaluation_and_others_than_in_training(tmp_path):
    cast = Cast()
    await play(cast, config(), tmp_path, eval_prompts=prompts(2))
    first, second = (
        {g.group_id.split("/")[2]: g.seeds for r in asked(cast)[part] for g in r.groups}
        for part in (slice(0, 2), slice(2, 4))
    )
    assert first == second
    assert len({seed for seeds in first.values() for seed in seeds}) == 6
    in_training = {
        seed for r in cast.sampler.log if r not in asked(cast) for g in r.groups for seed in g.seeds
    }
    assert in_training.isdisjoint(seed for seeds in first.values() for seed in seeds)
    names = [name for r in asked(cast) for g in r.groups for name in g.sample_ids]
    assert len(set(names)) == len(names)


async def test_training_is_the_same_with_and_without(tmp_path):
    casts = [Cast(), Cast()]
    await play(casts[0], config(), tmp_path / "with")
    await play(casts[1], ppo_config(), tmp_path / "without")
    first, second = (
        [{k: v for k, v in m.items() if not k.startswith("timing/")} for m in cast.metrics]
        for cast in casts
    )
    assert first == second


async def test_rewards_count_without_penalties(tmp_path):
    cast = Cast()
    reward = {"overlong_buffer_len": 1000, "overlong_penalty_factor": 9.0}
    await play(cast, config(reward=reward), tmp_path)
    row = evals(cast)[1]
    assert 0 < row["eval_math_pass1"] < row["eval_math_pass3"] < 1


async def test_deterministic_calls_are_fixed_isolated_and_one_after_the_other(tmp_path):
    train = {"batch_size": 4, "seed": 7, "full_determinism_enable": True}
    rows = []
    for number in range(2):
        cast = Cast()
        await play(cast, config(train=train), tmp_path / str(number), eval_prompts=prompts(30))
        calls = asked(cast)
        assert [len(r.groups) for r in calls] == [21, 9] * 2
        assert all(r.isolated for r in calls)
        assert cast.sampler.most_in_flight == 1
        rows.append(
            {s: {k: v for k, v in m.items() if "timing" not in k} for s, m in evals(cast).items()}
        )
    assert rows[0] == rows[1]
    free = Cast()
    await play(free, config(), tmp_path / "free", eval_prompts=prompts(30))
    assert evals(free)[1]["eval_default_pass3"] == rows[0][1]["eval_default_pass3"]


async def test_prompts_in_flight_are_bounded(tmp_path):
    cast = Cast()
    rollout = {"batch_size": 4, "max_new_tokens": 1024, "max_groups_in_flight": 2}
    await play(cast, config(rollout=rollout), tmp_path, eval_prompts=prompts(9))
    assert cast.sampler.most_in_flight == 2


async def test_samples_that_fail_are_counted_and_left_out(tmp_path):
    cast = Cast()
    cast.sampler.failures = {"eval/1/e0/0": BROKEN, "eval/1/e0/1": FinishReason.ABORTED}
    cast.judge.failures = {"eval/1/e1/2": BROKEN, **{f"eval/1/e2/{i}": BROKEN for i in range(3)}}
    await play(cast, config(), tmp_path)
    row = evals(cast)[1]
    assert row["eval_num_samples"] == 6
    assert row["eval_num_failed"] == 6
    assert row["eval_failed/rollout_time_limit"] == 1
    assert row["eval_failed/rollout_aborted"] == 1
    assert row["eval_failed/reward_time_limit"] == 4
    assert not any(name.startswith("dropped/") for _, _, m in cast.sink.rows for name in m)
    assert evals(cast)[2]["eval_num_failed"] == 0


async def test_an_evaluation_without_any_score_does_not_end_the_run(tmp_path):
    cast = Cast()
    score, generate = cast.judge.score, cast.sampler.generate

    async def broken_score(request):
        if request.items[0].sample_id.startswith("eval/1/"):
            raise InfraError("no answer", reason="UNAVAILABLE")
        return await score(request)

    async def broken_generate(request):
        if request.groups[0].group_id.startswith("eval/2/"):
            raise DataError("too long", reason="PROMPT_TOO_LONG")
        return await generate(request)

    cast.judge.score, cast.sampler.generate = broken_score, broken_generate
    _, counts = await play(cast, config(), tmp_path)
    first, second = evals(cast)[1], evals(cast)[2]
    assert first["eval_failed/reward_unavailable"] == 12
    assert second["eval_failed/rollout_prompt_too_long"] == 12
    assert first["eval_num_samples"] == second["eval_num_samples"] == 0
    assert "eval_response_length_mean" in first
    assert "eval_response_length_mean" not in second
    assert not any("pass" in name for name in first | second)
    assert counts == {"trained": 16}


async def test_an_answer_by_other_weights_ends_the_run(tmp_path):
    cast = Cast()
    generate = cast.sampler.generate

    async def ahead(request):
        if request.groups[0].group_id.startswith("eval/"):
            cast.sampler.version = 9
        return await generate(request)

    cast.sampler.generate = ahead
    with pytest.raises(BaseExceptionGroup) as caught:
        await play(cast, config(), tmp_path)
    error = caught.value.exceptions[0]
    assert isinstance(error, FatalError)
    assert "evaluation of version 2 with version 9" in str(error)


def group(index, rewards, *, source="default", scores=None, lengths=None):
    """A scored prompt; None is a sample without a reward."""
    (prompt,) = prompts(1)
    made = Group(index=index, prompt=replace(prompt, prompt_id=f"p{index}", datasource=source))
    for i, reward in enumerate(rewards):
        if reward is not None:
            score = reward if scores is None else scores[i]
            made.rewards[f"{index}/{i}"] = Reward(reward=reward, score=score)
    return made


def test_every_prompt_weighs_the_same_whatever_failed():
    metrics = evaluation_metrics(
        [group(0, [1.0, 3.0]), group(1, [5.0, None]), group(2, [None, None])], num_samples=2
    )
    assert metrics["eval_default_pass2"] == (3.0 + 5.0) / 2
    assert metrics["eval_default_pass1"] == (2.0 + 5.0) / 2
    assert metrics["eval_num_samples"] == 3
    assert not any("pass_at" in name for name in metrics)


def test_scores_of_0_and_1_give_the_unbiased_pass_at_k():
    # n = 4: c = 1 and c = 4, and a prompt of which two samples are left, c = 1.
    metrics = evaluation_metrics(
        [group(0, [0, 1, 0, 0]), group(1, [1, 1, 1, 1]), group(2, [None, 0, None, 1])],
        num_samples=4,
    )
    assert metrics["eval_default_pass_at_1"] == pytest.approx((1 / 4 + 1 + 1 / 2) / 3)
    assert metrics["eval_default_pass_at_2"] == pytest.approx((1 / 2 + 1 + 1) / 3)
    assert metrics["eval_default_pass_at_4"] == pytest.approx((1 + 1) / 2)


def test_scores_decide_what_is_binary_not_rewards():
    shaped = [group(0, [-1.0, 0.7], scores=[0, 1])]
    metrics = evaluation_metrics(shaped, num_samples=2)
    assert metrics["eval_default_pass_at_1"] == 0.5
    assert metrics["eval_default_pass1"] == pytest.approx(-0.15)
    mixed = evaluation_metrics([*shaped, group(1, [0.5, 0.5], source="other")], num_samples=2)
    assert "eval_default_pass_at_2" in mixed
    assert "eval_other_pass_at_2" not in mixed


@pytest.mark.parametrize(("n", "ks"), [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8])])
def test_names_are_known_before_anything_runs(n, ks):
    found = evaluation_metrics(
        [group(0, [1.0] * n), group(1, [0.0] * n, source="b")], num_samples=n
    )
    names = metric_names(["default", "b"], num_samples=n)
    assert {f"eval_b_pass_at_{k}" for k in ks} <= names
    assert {name for name in found if "_pass" in name} == {n for n in names if "_pass" in n}

"""Faults of evaluation and of what follows from it: best checkpoints, filtering."""

import json
from dataclasses import replace

from quartet.trainer.evaluate import evaluation_metrics
from quartet.trainer.experience import Group
from quartet.types import Failure, Reward
from tests.unit.trainer import test_best as best
from tests.unit.trainer import test_filtering as filtering
from tests.unit.trainer.players import Cast, prompts
from tests.unit.trainer.test_evaluate import config, evals, play


async def test_fault_08_the_best_checkpoint_holds_the_weights_that_were_evaluated(tmp_path):
    cast = best.new_cast()
    train = {"batch_size": 3, "seed": 7}
    steps = {}
    push = cast.policy.push_weights

    async def noting(**call):
        steps[call["policy_version"]] = cast.policy.steps
        return await push(**call)

    cast.policy.push_weights = noting
    await best.play(cast, best.config(tmp_path, train=train), tmp_path)
    evaluated = {
        r.groups[0].group_id.split("/")[1]: r.min_policy_version
        for r in cast.sampler.log
        if r.groups[0].group_id.startswith("eval/")
    }
    (name,) = best.kept(tmp_path)
    folder = tmp_path / "ckpt/best/_actor" / name
    inside = int((folder / "steps").read_text().split()[0])
    assert inside == steps[evaluated[name.removeprefix("best_global_step")]] == 8


async def test_fault_09_a_checkpoint_knows_the_evaluation_of_its_own_step(tmp_path):
    cast = best.new_cast()
    await best.play(cast, best.config(tmp_path, ckpt={"save_steps": 1, "max_num": 9}), tmp_path)
    known = {
        step: json.loads((tmp_path / f"ckpt/_actor/global_step{step}/state").read_text())
        for step in (1, 2, 3, 4)
    }
    values = {step: kept["state"]["best"]["value"] for step, kept in known.items()}
    assert values == {1: 0.2, 2: 0.7, 3: 0.7, 4: 0.9}


async def test_fault_80_the_flag_wins_over_what_the_checkpoint_was_chosen_by(tmp_path):
    short = {"batch_size": 4, "seed": 7, "max_steps": 2}
    await best.play(
        best.new_cast(), best.config(tmp_path, ckpt={"save_steps": 1}, train=short), tmp_path
    )
    key = "eval_default_response_length_mean"
    ckpt = {"save_steps": 1, "load_enable": True, "best_metric_key": key}
    run, state = await best.play(
        best.new_cast(), best.config(tmp_path, ckpt=ckpt), tmp_path / "resumed"
    )
    assert best.record(tmp_path)["key"] == state["best"]["key"] == key
    assert "chosen by eval_default_pass1 so far, from now on by" in run.progress._stream.getvalue()
    assert len(best.kept(tmp_path)) == 1


async def test_fault_20_equal_scores_are_replaced_and_the_pass_rate_is_a_share_of_groups(tmp_path):
    drawn = filtering.order(4)
    # Equal scores with a mean inside the range: the group's advantages would all be 0.
    cast = filtering.new_cast({drawn[0]: filtering.FLAT})
    counts, _ = await filtering.play(cast, filtering.config(), tmp_path, num_prompts=4)
    assert counts == {"trained": 6, "dropped": 2}
    assert cast.metrics[0]["dynamic_filtering_pass_rate"] == 75.0


def test_fault_25_pass_at_k_is_no_mean_of_maxima():
    (prompt,) = prompts(1)
    group = Group(index=0, prompt=prompt)
    group.rewards = {str(i): Reward(reward=float(i == 0), score=float(i == 0)) for i in range(4)}
    metrics = evaluation_metrics([group], num_samples=4)
    assert metrics["eval_default_pass_at_2"] == 0.5
    assert metrics["eval_default_pass4"] == 1.0


async def test_fault_25_equal_prompts_of_two_sources_stay_apart(tmp_path):
    base = prompts(1)[0]
    same_text = [
        replace(base, prompt_id="a", datasource="easy", label="1"),
        replace(base, prompt_id="b", datasource="hard", label="2"),
    ]
    cast = Cast()
    score = cast.judge.score

    async def by_label(request):
        batch = await score(request)
        rewards = [Reward(reward=float(i.label), score=float(i.label)) for i in request.items]
        results = (
            replace(r, outcome=reward) for r, reward in zip(batch.results, rewards, strict=True)
        )
        return replace(batch, results=tuple(results))

    cast.judge.score = by_label
    await play(cast, config(), tmp_path, eval_prompts=same_text)
    row = evals(cast)[1]
    assert (row["eval_easy_pass1"], row["eval_hard_pass1"]) == (1.0, 2.0)


async def test_fault_49_a_missing_reward_is_counted(tmp_path):
    cast = Cast()
    cast.judge.failures = {
        "eval/1/p0/0": Failure(error_class="DATA", reason="BAD_ANSWER", message="None")
    }
    settings = config(eval={"steps": 1, "n_samples_per_prompt": 2})
    await play(cast, settings, tmp_path, eval_prompts=prompts(2))
    assert evals(cast)[1]["eval_failed/reward_bad_answer"] == 1.0
    assert evals(cast)[1]["eval_num_samples"] == 3.0

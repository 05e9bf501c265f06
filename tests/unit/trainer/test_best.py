"""The best checkpoint: which weights, which metric, one at a time, and over a resume."""

import json
from dataclasses import replace

import pytest

from quartet.errors import ConfigError, InfraError
from quartet.trainer.best import best_key
from quartet.trainer.ppo_loop import PpoLoop
from quartet.types import Failure, Reward
from tests.unit.trainer.players import Cast, FakeTrainee, inputs, ppo_config, prompts

VALUES = {1: 0.2, 2: 0.7, 3: 0.7, 4: 0.9}
"""Reward of every sample of an evaluation, by its step."""


def config(folder, **sections):
    ckpt = {"save_steps": -1, "path": str(folder / "ckpt"), "output_dir": "/exported"}
    ckpt |= sections.pop("ckpt", {})
    return ppo_config(
        **{
            "eval": {"steps": 1, "n_samples_per_prompt": 2},
            "train": {"batch_size": 4, "seed": 7},
            "rollout": {"batch_size": 2, "n_samples_per_prompt": 2, "max_new_tokens": 8},
            "ckpt": ckpt,
        }
        | sections
    )


def new_cast(values=VALUES, **players):
    """Players whose evaluations give the values by step."""
    cast = Cast(**players)
    score = cast.judge.score

    async def by_step(request):
        batch = await score(request)
        results = []
        for result in batch.results:
            where, step, *_ = result.sample_id.split("/")
            if where == "eval" and not isinstance(result.outcome, Failure):
                value = values[int(step)]
                result = replace(result, outcome=Reward(reward=value, score=value))
            results.append(result)
        return replace(batch, results=tuple(results))

    cast.judge.score = by_step
    return cast


async def play(cast, settings, folder, *, eval_prompts=None):
    folder.mkdir(parents=True, exist_ok=True)
    run = cast.run(settings, folder)
    given = replace(inputs(8), eval_prompts=eval_prompts or prompts(2))
    try:
        await PpoLoop(settings, run, given, cast.players).run()
        return run, await run.ledger.load_state()
    finally:
        await run.ledger.close()
        run.progress.close()


def kept(folder, role="_actor"):
    """The checkpoints in the best folder."""
    return sorted(p.name for p in (folder / "ckpt/best" / role).glob("*global_step*"))


def saved(cast):
    """Names of the checkpoints written, in order."""
    return [entry[2] for entry in cast.policy.of("checkpoint")]


def record(folder):
    return json.loads((folder / "ckpt/best/best.json").read_text())


async def test_each_better_one_takes_the_place_of_the_last(tmp_path):
    cast = new_cast(critic=FakeTrainee(head="value"))
    settings = config(tmp_path, algo={"advantage": {"estimator": "gae"}})
    run, state = await play(cast, settings, tmp_path)
    # Step 3 is as good as step 2, and so no better.
    assert saved(cast) == [f"best_global_step{i}" for i in (1, 2, 4)]
    assert kept(tmp_path) == kept(tmp_path, "_critic") == ["best_global_step4"]
    expected = {"key": "eval_default_pass1", "value": 0.9, "step": 4}
    assert record(tmp_path) == run.summary["best"] == state["best"] == expected


async def test_the_old_one_goes_when_the_new_one_is_whole(tmp_path):
    cast = new_cast()
    save = cast.policy.save_checkpoint

    async def full_disk(**call):
        if call["tag"] == "best_global_step4":
            raise InfraError("the disk is full")
        return await save(**call)

    cast.policy.save_checkpoint = full_disk
    with pytest.raises(InfraError):
        await play(cast, config(tmp_path), tmp_path)
    assert kept(tmp_path) == ["best_global_step2"]
    assert record(tmp_path)["step"] == 2


async def test_none_keeps_none_and_no_evaluation_either(tmp_path):
    for number, sections in enumerate(
        (
            {"ckpt": {"best_metric_key": "none"}},
            {"eval": {"steps": -1}},
            {"ckpt": {"disable_ds": True}},
        )
    ):
        cast = new_cast()
        await play(cast, config(tmp_path / str(number), **sections), tmp_path / str(number))
        assert saved(cast) == []


async def test_copy_for_transformers(tmp_path):
    cast = new_cast()
    await play(cast, config(tmp_path, ckpt={"save_hf": True, "disable_ds": True}), tmp_path)
    exported = [e[1] for e in cast.policy.of("export")]
    folder = f"{tmp_path}/ckpt/best"
    assert exported[:-1] == [f"{folder}/best_global_step{i}_hf" for i in (1, 2, 4)]
    assert saved(cast) == []


async def test_it_does_not_change_where_a_run_goes_on(tmp_path):
    cast = new_cast({1: 0.9, 2: 0.1, 3: 0.1, 4: 0.1})
    await play(cast, config(tmp_path, ckpt={"save_steps": 3}), tmp_path)
    assert (tmp_path / "ckpt/_actor/latest").read_text() == "global_step3"
    resumed = new_cast()
    await play(resumed, config(tmp_path, ckpt={"load_enable": True}), tmp_path)
    assert resumed.policy.of("load")[0][2] == "global_step3"
    # From the folder of the best one, a run goes on from there.
    again, folder = new_cast(), str(tmp_path / "ckpt/best")
    await play(again, config(tmp_path, ckpt={"load_enable": True, "path": folder}), tmp_path / "b")
    assert again.policy.of("load")[0][2] == "best_global_step1"


@pytest.mark.parametrize("kill_at", [1, 2, 3])
async def test_a_run_killed_after_any_evaluation_ends_with_the_same_best(tmp_path, kill_at):
    """Killed between the best checkpoint and the step's own: what was the best stays it."""
    values = {1: 0.2, 2: 0.8, 3: 0.5, 4: 0.6}
    killed = new_cast(values)
    save = killed.policy.save_checkpoint

    async def dying(**call):
        if call["tag"] == f"global_step{kill_at}":
            raise InfraError("the machine is gone")
        return await save(**call)

    killed.policy.save_checkpoint = dying
    every = {"save_steps": 1}
    with pytest.raises(InfraError):
        await play(killed, config(tmp_path, ckpt=every), tmp_path)
    resumed = new_cast(values)
    again = every | ({"load_enable": True} if kill_at > 1 else {})
    await play(resumed, config(tmp_path, ckpt=again), tmp_path / "again")
    assert kept(tmp_path) == ["best_global_step2"]
    assert record(tmp_path) == {"key": "eval_default_pass1", "value": 0.8, "step": 2}


async def test_a_save_before_the_kill_that_nothing_names_is_replaced(tmp_path):
    every = {"save_steps": 1}
    await play(
        new_cast(), config(tmp_path, ckpt=every, train={"batch_size": 4, "max_steps": 1}), tmp_path
    )
    left = tmp_path / "ckpt/best/_actor/best_global_step2"
    left.mkdir()
    (left / "of the killed run").touch()
    resumed = new_cast()
    settings = config(tmp_path, ckpt=every | {"load_enable": True})
    await play(
        resumed, replace(settings, train=replace(settings.train, max_steps=2)), tmp_path / "b"
    )
    assert kept(tmp_path) == ["best_global_step2"]
    assert sorted(p.name for p in left.iterdir()) == ["state", "steps"]


async def test_too_many_failures_choose_no_checkpoint(tmp_path):
    cast = new_cast()
    broken = Failure(error_class="DATA", reason="TIME_LIMIT", message="")
    cast.judge.failures = {
        "eval/2/p0/0": broken,
        **{f"eval/4/p{i}/{j}": broken for i in range(2) for j in range(2)},
    }
    await play(cast, config(tmp_path), tmp_path)
    assert saved(cast) == ["best_global_step1", "best_global_step3"]


async def test_any_metric_of_the_evaluation(tmp_path):
    cast = new_cast({1: 1.0, 2: 0.0, 3: 1.0, 4: 1.0})
    key = "eval_default_pass_at_2"
    await play(cast, config(tmp_path, ckpt={"best_metric_key": key}), tmp_path)
    assert record(tmp_path) == {"key": key, "value": 1.0, "step": 1}


async def test_pass_at_k_of_scores_that_are_not_binary_is_found_out_at_once(tmp_path):
    settings = config(tmp_path, ckpt={"best_metric_key": "eval_default_pass_at_2"})
    with pytest.raises(ConfigError, match="no evaluation of this run has it") as caught:
        await play(new_cast(), settings, tmp_path)
    assert "eval_default_pass1" in caught.value.info.remedy
    assert "pass_at" not in caught.value.info.remedy


def test_key_before_anything_runs(tmp_path):
    settings = config(tmp_path)
    assert best_key(settings, {"math", "code"}) == "eval_code_pass1"
    assert best_key(settings, ()) is None
    named = config(tmp_path, ckpt={"best_metric_key": "eval_math_pass2"})
    assert best_key(named, {"math", "code"}) == "eval_math_pass2"
    with pytest.raises(ConfigError, match="eval_math_pass2: no evaluation") as caught:
        best_key(named, {"code"})
    assert caught.value.info.field == "ckpt.best_metric_key"
    assert "eval_code_pass_at_2" in caught.value.info.remedy

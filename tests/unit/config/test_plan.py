from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from quartet.config import (
    LearnerServeConfig,
    PpoConfig,
    RewardServeConfig,
    RmConfig,
    RolloutServeConfig,
    SftConfig,
)
from quartet.config.counting import count_datasets
from quartet.config.files import to_yaml
from quartet.config.load import build, load
from quartet.config.machine import Machine
from quartet.config.plan import planned_machine, render_plan, render_service

GOLDEN = Path(__file__).parents[2] / "golden" / "config"
CPU, EIGHT = Machine(), Machine(num_gpus=8, has_vllm=True)


def plain(text: str) -> str:
    return re.sub(r"run_\d{4}T\d{6}", "run_TIME", text)


def test_the_seeds_line(seed_line: list[str]):
    """To renew: quartet train ppo $(cat seed_line.txt) --dry-run, with the time taken out."""
    loaded = load(PpoConfig, seed_line, environ={})
    text = plain(render_plan(loaded.config, CPU, loaded.origins))
    assert text == (GOLDEN / "seed_plan.txt").read_text(encoding="utf-8")
    assert "4 engines x TP 2  GPUs 0-1 | 2-3 | 4-5 | 6-7" in text


def test_a_run_on_the_cpu(ppo_line: list[str], tmp_path: Path):
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"input": "x"}\n' * 10 + "\n")
    flags = [
        *ppo_line,
        *("--data.prompt_dataset", str(data), "--rollout.batch_size", "4"),
        *("--rollout.n_samples_per_prompt", "2", "--train.batch_size", "3"),
        *("--rollout.max_new_tokens", "64", "--train.max_epochs", "2"),
        *("--learner.num_ranks", "2", "--metrics.port", "9000", "--ds.param_dtype", "fp32"),
    ]
    loaded = load(PpoConfig, flags, environ={})
    text = render_plan(loaded.config, CPU, loaded.origins)
    for line in (
        "no GPU: all on the CPU",
        "learner  2 ranks    CPU  org/policy, ZeRO stage 2, fp32",
        "metrics on 127.0.0.1:9000",
        "4 prompts x 2 = 8 samples, each of at most 64 tokens",
        "6 a rollout: 2 passes of 2 x 3 and 1 x 2 samples",
        "1 a pass, 2 samples a rank: 2 a step",
        "prompts          10",
        "rollouts         3, the last of each episode with 2 prompts",
        "push by gloo: there is no GPU here",
        "nothing that is known without loading models or data keeps it from running",
    ):
        assert line in text


def test_ranks_that_share_samples_are_named_and_counted(ppo_line: list[str]):
    flags = [
        *(*ppo_line, "--learner.num_ranks", "8", "--ds.packing_samples", "--train.batch_size", "6"),
        *("--ds.tensor_parallel_size", "2", "--ds.ring_attn_size", "2"),
    ]
    loaded = load(PpoConfig, flags, environ={})
    text = render_plan(loaded.config, CPU, loaded.origins)
    assert "ZeRO stage 2, bf16, TP 2, ring 2" in text
    assert "3 samples a rank" in text


def test_what_earlier_runs_left_is_named(ppo_line: list[str], tmp_path: Path):
    folders = ["--run.dir", str(tmp_path), "--run.name", "r", "--ckpt.path", str(tmp_path / "c")]
    new = load(PpoConfig, [*ppo_line, *folders], environ={}).config
    resumed = load(PpoConfig, [*ppo_line, *folders, "--ckpt.load_enable"], environ={}).config
    elsewhere = replace(resumed, learner=replace(resumed.learner, address="127.0.0.1:7004"))
    taken = f"--run.name r: {tmp_path / 'r'} already holds a run"
    missing = f"--ckpt.path {tmp_path / 'c'}: there is no checkpoint to go on from"
    assert taken not in render_plan(new, CPU)
    assert missing in render_plan(resumed, CPU)
    assert missing not in render_plan(elsewhere, CPU)
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "ledger.sqlite").touch()
    (tmp_path / "c" / "_actor" / "global_step2").mkdir(parents=True)
    (tmp_path / "c" / "_actor" / "global_step2" / "checkpoint.json").touch()
    assert taken in render_plan(new, CPU)
    assert taken not in render_plan(resumed, CPU)
    assert missing not in render_plan(resumed, CPU)


def test_steps_are_capped(ppo_line: list[str], tmp_path: Path):
    data = tmp_path / "prompts.json"
    data.write_text('[{"input": "x"}, {"input": "y"}]')
    flags = [*ppo_line, "--data.prompt_dataset", str(data), "--rollout.batch_size", "1"]
    flags += ["--train.batch_size", "1", "--train.num_episodes", "5", "--train.max_steps", "3"]
    loaded = load(PpoConfig, flags, environ={})
    assert "rollouts         3\n" in render_plan(loaded.config, CPU, loaded.origins)


def test_addresses(ppo_line: list[str]):
    flags = [*ppo_line, "--rollout.address", "127.0.0.1:7001,127.0.0.1:7002"]
    flags += ["--learner.address", "127.0.0.1:7004"]
    loaded = load(PpoConfig, flags, environ={})
    text = render_plan(loaded.config, CPU, loaded.origins)
    assert "given      127.0.0.1:7001, 127.0.0.1:7002  not started by the trainer" in text
    assert "cut by the learner at its address" in text
    assert "push by auto: the services say what they have" in text


@pytest.mark.parametrize("cls", [SftConfig, RmConfig])
def test_offline(cls: type, tmp_path: Path):
    data = tmp_path / "data.csv"
    data.write_text('a,b\n1,"two\nlines"\n3,4\n5,6\n')
    config = build(
        cls,
        {
            "model.model_name_or_path": "org/lm",
            "data.dataset": str(data),
            "train.batch_size": 2,
            "train.max_epochs": 3,
        },
        {},
    )
    text = render_plan(config, CPU)
    what = "samples" if cls is SftConfig else "pairs"
    assert f"optimizer step   2 {what}" in text
    assert f"{what:<16} 3\n" in text
    assert "optimizer steps  at most 6" in text
    assert "final model      ./ckpt\n" in text


def test_plans_for_gpus_that_are_not_here(ppo_line: list[str]):
    eight = load(PpoConfig, [*ppo_line, "--actor.num_gpus_per_node", "8"], environ={})
    assert planned_machine(eight.config, CPU, eight.origins).num_gpus == 8
    assert planned_machine(eight.config, EIGHT, eight.origins) is EIGHT
    elsewhere = load(PpoConfig, [*ppo_line, "--vllm.tensor_parallel_size", "2"], environ={})
    assert planned_machine(elsewhere.config, CPU, elsewhere.origins).num_gpus == 8
    none = load(PpoConfig, ppo_line, environ={})
    assert planned_machine(none.config, CPU, none.origins) is CPU


def test_the_configuration_that_a_run_keeps_chooses_nothing(ppo_line: list[str], tmp_path: Path):
    """It holds every value, defaults too, and must not mean eight GPUs on a laptop."""
    first = load(PpoConfig, ppo_line, environ={})
    kept = tmp_path / "config.yaml"
    kept.write_text(to_yaml(first.config))
    again = load(PpoConfig, ["--config", str(kept)], environ={})
    assert again.config == first.config
    assert render_plan(again.config, CPU, again.origins) == render_plan(
        first.config, CPU, first.origins
    )


def test_services():
    learner = build(
        LearnerServeConfig,
        {"learner.model_name_or_path": "org/lm", "learner.head": "value", "rpc.port": 7004},
        {},
    )
    text = render_service(learner, CPU)
    assert "head       value, 1 rank, ZeRO stage 2" in text
    assert "listens    127.0.0.1:7004" in text
    rollout = build(RolloutServeConfig, {"rollout.model_name_or_path": "org/lm"}, {})
    assert "engine     transformers" in render_service(rollout, CPU)
    reward = build(RewardServeConfig, {"reward.remote_url": "http://h/x"}, {})
    assert "serves     http://h/x" in render_service(reward, CPU)
    assert "(any free port)" in render_service(reward, CPU)


def test_counting(tmp_path: Path):
    lines = tmp_path / "a.jsonl"
    lines.write_text("{}\n\n{}\n{}")
    listed = tmp_path / "b.json"
    listed.write_text("[1, 2]")
    assert count_datasets([str(lines)], 100).size == 3
    assert count_datasets([str(lines), str(listed)], 100).size == 5
    assert count_datasets([str(lines), str(listed)], 2).size == 2
    listed.write_text("{}\n{}\n")
    assert count_datasets([str(listed)], 100).size == 2
    listed.write_text("{}")
    assert count_datasets([str(listed)], 100).size is None
    for name, why in (
        ("org/data", "is not on this machine"),
        (str(tmp_path), "is a folder"),
        (str(tmp_path / "c.parquet"), "is counted by its loader"),
    ):
        (tmp_path / "c.parquet").touch()
        counted = count_datasets([name], 100)
        assert counted.size is None
        assert why in counted.why

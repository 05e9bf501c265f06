"""SFT, then a reward model and DPO on top of it, each with services that the trainer starts."""

import json
import math
import os
import subprocess
import sys

import pytest
from safetensors.torch import load_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def train(method, *flags):
    done = subprocess.run(
        [sys.executable, "-m", "quartet", "train", method, "--ds.param_dtype", "fp32", *flags],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def metrics(folder, kind):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


def test_sft_learns_and_a_reward_model_and_dpo_learn_from_it(tmp_path, tiny_model_dir):
    answers = write(
        tmp_path / "sft.jsonl",
        [{"input": f"What is {i} + 1?", "output": f" It is {i + 1}."} for i in range(10)],
    )
    common = ("--run.dir", str(tmp_path), "--data.max_len", "64", "--train.batch_size", "4")
    train(
        "sft",
        *("--model.model_name_or_path", str(tiny_model_dir), "--data.dataset", answers),
        *("--data.output_key", "output", "--eval.dataset", answers, "--train.max_epochs", "3"),
        *("--adam.lr", "5e-3", "--run.name", "sft", "--ckpt.output_dir", str(tmp_path / "lm")),
        *("--logger.tensorboard_dir", str(tmp_path / "tb"), *common),
    )
    steps = metrics(tmp_path / "sft", "train")
    assert [row["num_samples_trained"] for row in steps] == [4, 4, 2] * 3
    evals = metrics(tmp_path / "sft", "eval")
    assert [row["global_step"] for row in evals] == [3, 6, 9]
    assert evals[-1]["gpt_loss"] < evals[0]["gpt_loss"] < steps[0]["gpt_loss"]
    assert list((tmp_path / "tb").rglob("events.out.tfevents.*"))

    pairs = write(
        tmp_path / "pairs.jsonl",
        [
            {"prompt": f"Say {i}.", "chosen": f" good day {i}", "rejected": f" bad night {i}"}
            for i in range(11)
        ],
    )
    out = train(
        "rm",
        *("--model.model_name_or_path", str(tmp_path / "lm"), "--data.dataset", pairs),
        *("--data.prompt_key", "prompt", "--train.max_epochs", "3", "--adam.lr", "2e-3"),
        *("--run.name", "rm", "--ckpt.output_dir", str(tmp_path / "rm-model"), *common),
    )
    assert "of the first 11 training pairs" in out
    last = metrics(tmp_path / "rm", "eval")[-1]
    assert last["acc_mean"] == 1.0
    config = json.loads((tmp_path / "rm-model" / "config.json").read_text())
    assert config["mean"] == pytest.approx(last["reward_mean"])
    assert config["std"] == pytest.approx(last["reward_std"])

    train(
        "dpo",
        *("--model.model_name_or_path", str(tmp_path / "lm"), "--data.dataset", pairs),
        *("--data.prompt_key", "prompt", "--eval.dataset", pairs, "--train.max_epochs", "3"),
        *("--adam.lr", "2e-3", "--run.name", "dpo", "--ckpt.output_dir", str(tmp_path / "dpo-lm")),
        *common,
    )
    first, *_ = metrics(tmp_path / "dpo", "train")
    # Before any update policy and reference are one model.
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["chosen_reward"] == pytest.approx(0, abs=1e-6)
    last = metrics(tmp_path / "dpo", "eval")[-1]
    assert last["acc_mean"] == 1.0
    assert last["eval_loss"] < math.log(2)
    assert last["chosen_reward"] > last["reject_reward"]


def test_both_with_adapters(tmp_path, tiny_model_dir):
    """The reward model starts from the merged language model, and keeps its trained head."""
    answers = write(
        tmp_path / "sft.jsonl",
        [{"input": f"What is {i} + 1?", "output": f" It is {i + 1}."} for i in range(8)],
    )
    common = (
        *("--run.dir", str(tmp_path), "--data.max_len", "64", "--train.batch_size", "4"),
        *("--ds.lora.rank", "4", "--adam.lr", "1e-2", "--train.max_epochs", "3"),
    )
    train(
        "sft",
        *("--model.model_name_or_path", str(tiny_model_dir), "--data.dataset", answers),
        *("--data.output_key", "output", "--run.name", "sft"),
        *("--ckpt.output_dir", str(tmp_path / "lm"), *common),
    )
    steps = metrics(tmp_path / "sft", "train")
    assert steps[-1]["gpt_loss"] < steps[0]["gpt_loss"]
    assert (tmp_path / "lm" / "adapter" / "adapter_config.json").is_file()

    pairs = write(
        tmp_path / "pairs.jsonl",
        [
            {"prompt": f"Say {i}.", "chosen": f" good day {i}", "rejected": f" bad night {i}"}
            for i in range(8)
        ],
    )
    train(
        "rm",
        *("--model.model_name_or_path", str(tmp_path / "lm"), "--data.dataset", pairs),
        *("--data.prompt_key", "prompt", "--run.name", "rm"),
        *("--ckpt.output_dir", str(tmp_path / "rm-model"), *common),
    )
    assert metrics(tmp_path / "rm", "eval")[-1]["acc_mean"] == 1.0
    config = json.loads((tmp_path / "rm-model" / "config.json").read_text())
    beside = json.loads((tmp_path / "rm-model" / "adapter" / "model_config.json").read_text())
    assert (beside["mean"], beside["std"]) == (config["mean"], config["std"])
    head = load_file(tmp_path / "rm-model" / "model.safetensors")["score.weight"]
    adapter = load_file(tmp_path / "rm-model" / "adapter" / "adapter_model.safetensors")
    assert head.equal(adapter["base_model.model.score.weight"])

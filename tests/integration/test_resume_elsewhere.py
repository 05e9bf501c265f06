"""A run that goes on with other ranks and another ZeRO stage than it began with."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def train(*flags):
    done = subprocess.run(
        [sys.executable, "-m", "quartet", "train", "sft", "--ds.param_dtype", "fp32", *flags],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_run_of_two_ranks_goes_on_with_one(tmp_path, tiny_model_dir):
    data = tmp_path / "sft.jsonl"
    rows = [{"input": f"What is {i} + 1?", "output": f" It is {i + 1}."} for i in range(9)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = (
        *("--model.model_name_or_path", str(tiny_model_dir), "--data.dataset", str(data)),
        *("--data.output_key", "output", "--data.max_len", "64", "--train.batch_size", "3"),
        *("--train.max_steps", "5", "--adam.lr", "1e-3", "--run.dir", str(tmp_path)),
        *("--ckpt.path", str(tmp_path / "ckpt"), "--ckpt.output_dir", str(tmp_path / "lm")),
        *("--train.max_epochs", "2"),
    )
    train(
        *("--run.name", "whole", "--ckpt.save_steps", "3"),
        *("--learner.num_ranks", "2", "--ds.zero_stage", "3", *common),
    )
    said = train(
        *("--run.name", "onward", "--ckpt.load_enable"),
        *("--learner.num_ranks", "1", "--ds.zero_stage", "1", *common),
    )
    assert "going on from checkpoint global_step3" in said

    def steps(name):
        text = (tmp_path / name / "metrics.jsonl").read_text()
        return [row for row in map(json.loads, text.splitlines()) if row["kind"] == "train"]

    expected, got = steps("whole")[3:], steps("onward")
    assert [row["global_step"] for row in got] == [4, 5]
    for one, other in zip(expected, got, strict=True):
        for name in ("gpt_loss", "grad_norm", "lr"):
            assert other[name] == pytest.approx(one[name], rel=1e-5), name

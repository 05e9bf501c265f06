"""PPO with evaluation and filtering over real service processes: rows, best checkpoint, drops."""

import json

import pytest

from tests.integration.test_ppo_services import COMMON, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

REWARD = """
def reward_func(queries, prompts, labels, **kwargs):
    # Binary, and neither always 0 nor always 1 for a policy that knows nothing.
    found = [float(sum(map(ord, q[len(p):])) % 2) for q, p in zip(queries, prompts)]
    return {"rewards": found, "scores": found}
"""


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_evaluation_rows_and_the_best_checkpoint(tmp_path, tiny_model_dir):
    (tmp_path / "reward.py").write_text(REWARD)
    prompts = write(tmp_path / "train.jsonl", [{"input": f"{i} + {i} = "} for i in range(8)])
    # The same text in two sources.
    held_out = write(
        tmp_path / "eval.jsonl",
        [{"input": "What is 3?", "datasource": name} for name in ("easy", "hard")]
        + [{"input": "What is 4?", "datasource": "hard"}],
    )
    folder = tmp_path / "run"
    train(
        *("--actor.model_name_or_path", str(tiny_model_dir), "--data.prompt_dataset", prompts),
        *("--reward.remote_url", str(tmp_path / "reward.py")),
        *("--algo.advantage.estimator", "group_norm", "--algo.kl.init_coef", "0"),
        *("--eval.dataset", held_out, "--eval.steps", "1", "--eval.n_samples_per_prompt", "4"),
        *("--ckpt.best_metric_key", "eval_hard_pass_at_2", "--ckpt.path", str(tmp_path / "ckpt")),
        *("--ckpt.output_dir", str(tmp_path / "model")),
        *("--run.dir", str(tmp_path), "--run.name", "run", *COMMON),
    )
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["kind"] for row in rows] == ["train", "eval"] * 2
    for row in rows[1::2]:
        assert row["eval_num_samples"] == 12
        assert row["eval_num_failed"] == 0
        assert row["eval_easy_pass1"] == pytest.approx(row["eval_easy_pass_at_1"])
        assert row["eval_hard_pass4"] == pytest.approx(row["eval_hard_pass_at_4"])
        assert 0 < row["eval_response_length_mean"] <= 8
        assert "timing/eval" not in row
    # Version 1 samples the first step, and the weights after it are the second.
    assert [row["policy_version"] for row in rows] == [1, 2, 2, 3]

    values = [row["eval_hard_pass_at_2"] for row in rows[1::2]]
    best = json.loads((tmp_path / "ckpt/best/best.json").read_text())
    step = values.index(max(values)) + 1
    assert best == {"key": "eval_hard_pass_at_2", "value": max(values), "step": step}
    (kept,) = (tmp_path / "ckpt/best/_actor").glob("*global_step*")
    assert kept.name == f"best_global_step{step}"
    facts = json.loads((kept / "checkpoint.json").read_text())
    # Optimizer steps of 5 and 3 samples in each step.
    assert facts["optimizer_steps"] == 2 * step


def test_filtered_groups_are_replaced(tmp_path, tiny_model_dir):
    (tmp_path / "reward.py").write_text(REWARD)
    prompts = write(tmp_path / "train.jsonl", [{"input": f"{i} + {i} = "} for i in range(12)])
    train(
        *("--actor.model_name_or_path", str(tiny_model_dir), "--data.prompt_dataset", prompts),
        *("--reward.remote_url", str(tmp_path / "reward.py")),
        *("--algo.advantage.estimator", "group_norm", "--algo.kl.init_coef", "0"),
        "--algo.dynamic_filtering_enable",
        *("--ckpt.output_dir", str(tmp_path / "model")),
        *("--run.dir", str(tmp_path), "--run.name", "run", *COMMON),
    )
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    # What the data's end leaves may hold no group that is worth training on.
    counts = [row.get("num_samples_trained", 0) for row in rows]
    lost = [row.get("dropped/filtered", 0) for row in rows]
    assert sum(lost) > 0
    assert sum(counts) + sum(lost) == 24
    assert all(count == 8 for count in counts[:-1])
    for row, count, filtered in zip(rows, counts, lost, strict=True):
        rate = 100 * count / (count + filtered)
        assert row["dynamic_filtering_pass_rate"] == pytest.approx(rate)
        # Two samples a group: those that differ have a mean of 1/2.
        assert row.get("score", 0.5) == 0.5

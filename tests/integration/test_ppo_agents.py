"""PPO with agents over real service processes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

GUESS_NUMBER = Path(__file__).parents[2] / "examples" / "agents" / "guess_number.py"

# The shape of OpenRLHF's own examples: its import, tensors as rewards, logs in the last step only.
INCUMBENT = """
import random
from typing import Any, Dict

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.step_idx = 0

    async def reset(self, states: dict, **kwargs):
        self.max_steps = 2
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs) -> Dict[str, Any]:
        action_text, label = states["action_text"], states["label"]
        done = self.step_idx >= self.max_steps - 1
        reward = torch.tensor(float(len(action_text) % 3)) if done else torch.tensor(0)
        self.step_idx += 1
        return {
            "rewards": reward,
            "scores": reward,
            "environment_feedback": "" if done else "\\n\\nHuman: again\\nAssistant: ",
            "done": done,
            "sampling_params": states.get("sampling_params", None),
            "extra_logs": {"dummy_scores": reward} if done else {},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


def train(*flags, check=True):
    """Run `quartet train ppo` to its end."""
    done = subprocess.run(
        [sys.executable, "-m", "quartet", "train", "ppo", *flags],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        timeout=300,
        check=False,
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def flags_of(tmp_path_factory, tiny_model_dir):
    """Flags of a run with an agent, and where it is."""
    folder = tmp_path_factory.mktemp("agents")
    rows = [{"input": f"Guess {i}:", "label": str(i)} for i in range(8)]
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def flags(name, agent, *more):
        return [
            *("--actor.model_name_or_path", str(tiny_model_dir)),
            *("--data.prompt_dataset", str(data), "--data.label_key", "label"),
            *("--data.max_len", "96", "--rollout.max_new_tokens", "8"),
            *("--rollout.batch_size", "4", "--rollout.n_samples_per_prompt", "2"),
            *("--train.batch_size", "8", "--train.micro_batch_size", "4"),
            *("--train.agent_func_path", str(agent), "--train.agent_num_workers", "1"),
            *("--algo.advantage.estimator", "group_norm", "--algo.kl.init_coef", "0"),
            *("--ds.param_dtype", "fp32", "--actor.adam.lr", "1e-3"),
            *("--run.dir", str(folder), "--run.name", name),
            *("--ckpt.output_dir", str(folder / name / "model"), *more),
        ], folder / name

    return flags


def rows_of(folder, kind="train"):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def test_the_guessing_game_is_trained_on_its_actions_alone(flags_of):
    evaluation = ["--eval.steps", "1", "--eval.n_samples_per_prompt", "2"]
    flags, folder = flags_of("guess", GUESS_NUMBER, *evaluation)
    data = flags[flags.index("--data.prompt_dataset") + 1]
    train(*flags, "--eval.dataset", data)
    rows = rows_of(folder)
    assert len(rows) == 2
    for row in rows:
        # On the tokens of both turns the learner finds the engine's own numbers: no token is
        # off by one, encoded again, or taken for an action.
        assert row["rollout_logprob_gap"] < 1e-4
        assert row["num_turns"] > 1
        assert row["num_samples_trained"] == 8
        assert row["ppo_ratio_first"] == pytest.approx(1.0, abs=1e-5)
        assert not [name for name in row if name.startswith("dropped/")]
    [evaluated, _] = rows_of(folder, "eval")
    assert evaluated["eval_num_samples"] == 16
    assert evaluated["eval_num_failed"] == 0
    assert not (folder / "services" / "reward.yaml").exists()
    shutil.rmtree(folder)


def test_an_incumbent_shape_runs_unchanged(flags_of, tmp_path):
    agent = tmp_path / "agent_func.py"
    agent.write_text(INCUMBENT.replace("async def __init__", "def __init__"))
    steps = ["--train.max_steps", "1", "--train.full_determinism_enable"]
    flags, folder = flags_of("incumbent", agent, *steps)
    train(*flags)
    [row] = rows_of(folder)
    assert row["rollout_logprob_gap"] < 1e-4
    assert row["dummy_scores"] == row["score"] == row["reward"]
    assert row["num_turns"] == 2
    # Each turn is a call of its own, so it does not matter which answer comes first.
    flags, again = flags_of("again", agent, *steps)
    train(*flags)
    metrics = "metrics.jsonl"
    assert (again / metrics).read_bytes() == (folder / metrics).read_bytes()


def test_an_async_init_is_one_line_before_anything_starts(flags_of, tmp_path):
    agent = tmp_path / "agent_func.py"
    agent.write_text(INCUMBENT)
    flags, folder = flags_of("async", agent)
    done = train(*flags, check=False)
    assert done.returncode == 2
    assert "AgentInstance.__init__ is async (agent_func.py:10)" in done.stderr.splitlines()[-1]
    assert not (folder / "services").exists()

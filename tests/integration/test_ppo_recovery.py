"""Runs that are disturbed: a killed rollout service, and a killed trainer that goes on."""

import asyncio
import json
import os
import signal
import sqlite3
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


class Disturbed:
    """GRPO runs with a reward file: three local services each."""

    def __init__(self, folder, model):
        self.folder = folder
        prompts = folder / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"input": f"Say {i}."}) + "\n" for i in range(12)))
        reward = folder / "my_reward.py"
        reward.write_text(
            "def reward_func(queries, prompts, labels, **kwargs):\n"
            "    return {'rewards': [float(q.count('e')) for q in queries]}\n"
        )
        self.flags = [
            *("--actor.model_name_or_path", str(model), "--data.prompt_dataset", str(prompts)),
            *("--reward.remote_url", str(reward), "--run.dir", str(folder)),
            *("--algo.advantage.estimator", "group_norm", "--algo.kl.init_coef", "0"),
            *("--data.max_len", "64", "--rollout.max_new_tokens", "8"),
            *("--rollout.batch_size", "4", "--rollout.n_samples_per_prompt", "4"),
            *("--train.batch_size", "8", "--train.micro_batch_size", "8"),
            *("--ds.param_dtype", "fp32", "--actor.adam.lr", "1e-3"),
            "--train.full_determinism_enable",
        ]

    async def start(self, name, *flags):
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "quartet", "train", "ppo", *self.flags),
            *("--run.name", name, "--ckpt.output_dir", str(self.folder / name / "model")),
            *("--ckpt.path", str(self.folder / f"{name}-checkpoints"), "--ckpt.save_steps", "1"),
            *flags,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )

    async def finish(self, process):
        out, _ = await process.communicate()
        assert process.returncode == 0, out.decode()
        return out.decode()

    async def reach_step(self, process, name, step):
        """Wait until a step is logged."""
        path = self.folder / name / "metrics.jsonl"
        async with asyncio.timeout(300):
            while not path.exists() or len(path.read_text().splitlines()) < step:
                assert process.returncode is None
                await asyncio.sleep(0.02)

    def metrics(self, name):
        return (self.folder / name / "metrics.jsonl").read_text()


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory, tiny_model_dir):
    return Disturbed(tmp_path_factory.mktemp("disturbed"), tiny_model_dir)


async def test_killed_rollout_service_costs_the_calls_in_flight(disturbed):
    process = await disturbed.start("rollout")
    await disturbed.reach_step(process, "rollout", 1)
    ready = json.loads((disturbed.folder / "rollout/services/rollout.ready").read_text())
    os.kill(ready["pid"], signal.SIGKILL)
    out = await disturbed.finish(process)
    assert "rollout ended with signal SIGKILL; starting it again (1 of at most 3)" in out
    rows = [json.loads(line) for line in disturbed.metrics("rollout").splitlines()]
    assert [row["global_step"] for row in rows] == [1, 2, 3]
    assert [row["num_samples_trained"] for row in rows] == [16, 16, 16]
    with sqlite3.connect(disturbed.folder / "rollout/ledger.sqlite") as db:
        assert db.execute("SELECT state, COUNT(*) FROM samples GROUP BY state").fetchall() == [
            ("trained", 48)
        ]


async def test_killed_trainer_goes_on_as_if_nothing_had_been(disturbed):
    process = await disturbed.start("killed")
    await disturbed.reach_step(process, "killed", 1)
    process.kill()
    await process.communicate()
    before = len(disturbed.metrics("killed").splitlines())
    assert before < 3
    out = await disturbed.finish(await disturbed.start("killed", "--ckpt.load_enable"))
    assert "going on from checkpoint global_step" in out
    # The run before was disturbed too, and its numbers are the same.
    assert disturbed.metrics("killed") == disturbed.metrics("rollout")

"""PPO ahead of training and with sleep between phases, over real service processes."""

import asyncio
import io
import json
import os
import subprocess
import sys

import pytest

from quartet.clients import LearnerClient, RolloutClient
from quartet.config import (
    ActorConfig,
    PpoConfig,
    PpoDsConfig,
    PpoTrainConfig,
    PromptDataConfig,
    RewardConfig,
    RolloutConfig,
)
from quartet.obs.progress import Progress
from quartet.rpc.probe import probe
from quartet.trainer.launch import Launcher
from quartet.trainer.services import local_services
from quartet.types import ForwardOutput, PromptGroup, SamplingParams, SequenceBatch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

FLAGS = [
    *("--algo.advantage.estimator", "group_norm", "--ds.param_dtype", "fp32"),
    *("--data.max_len", "64", "--rollout.max_new_tokens", "24"),
    *("--rollout.batch_size", "4", "--rollout.n_samples_per_prompt", "2"),
    *("--train.batch_size", "8", "--train.micro_batch_size", "8"),
    *("--rollout.micro_batch_size", "8", "--actor.adam.lr", "1e-3"),
    *("--actor.lr_warmup_ratio", "0"),
]
SLEEP = ("--train.colocate_all", "--vllm.enable_sleep", "--ds.enable_sleep")
DETERMINISTIC = ("--train.full_determinism_enable", "--train.max_steps", "2")


@pytest.fixture(scope="module")
def services(tmp_path_factory, tiny_model_dir, tiny_reward_model_dir):
    """Addresses of a policy's learner, and of reward, ref and rollout, that stand by themselves."""
    config = PpoConfig(
        actor=ActorConfig(model_name_or_path=str(tiny_model_dir)),
        reward=RewardConfig(model_name_or_path=str(tiny_reward_model_dir)),
        rollout=RolloutConfig(micro_batch_size=8),
        train=PpoTrainConfig(full_determinism_enable=True),
        data=PromptDataConfig(max_len=64),
        ds=PpoDsConfig(param_dtype="fp32", zero_stage=2),
    )
    wanted = [s for s in local_services(config) if s.role != "critic"]

    async def serves(address):
        return await probe(address) == "SERVING"

    with asyncio.Runner() as runner:
        progress = Progress(stream=io.StringIO())
        launcher = Launcher(
            tmp_path_factory.mktemp("services"), wanted, probe=serves, progress=progress
        )
        try:
            yield runner.run(launcher.start())
        finally:
            runner.run(launcher.stop())
            progress.close()


@pytest.fixture(scope="module")
def play(tmp_path_factory, services, tiny_model_dir):
    """Trains by the services; returns the rows of metrics.jsonl."""
    folder = tmp_path_factory.mktemp("runs")
    prompts = folder / "prompts.jsonl"
    rows = [{"input": f"What is {i} + {i + 1}?"} for i in range(16)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(name, *flags):
        command = [sys.executable, "-m", "quartet", "train", "ppo", *FLAGS, *flags]
        command += ["--actor.model_name_or_path", str(tiny_model_dir)]
        command += ["--data.prompt_dataset", str(prompts), "--run.dir", str(folder)]
        command += ["--run.name", name, "--ckpt.output_dir", str(folder / name / "model")]
        for role, address in services.items():
            command += [f"--{role}.address", address]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            command, capture_output=True, text=True, env=env, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        lines = (folder / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    return run


def test_sleep_between_phases_changes_no_number(play):
    asleep = play("asleep", *DETERMINISTIC, *SLEEP)
    assert asleep == play("awake", *DETERMINISTIC)
    assert [row["rollout_logprob_gap"] < 1e-4 for row in asleep] == [True, True]
    assert asleep[1]["kl"] != 0.0


@pytest.mark.parametrize("flags", [(), ("--train.partial_rollout_enable",)])
def test_generation_runs_ahead_and_the_engine_follows(play, services, flags):
    rows = play(f"ahead{len(flags)}", "--train.async_enable", *flags)
    assert [row["num_samples_trained"] for row in rows] == [8.0] * 4
    assert [row["policy_version"] for row in rows] == [1.0, 2.0, 3.0, 4.0]
    # The second rollout was begun while the first was trained.
    assert rows[0]["staleness/max"] == 0
    assert {row["staleness/max"] for row in rows[1:]} <= {0.0, 1.0}
    assert rows[1]["staleness/max"] == 1
    # What is optimised is the policy of now, whoever sampled.
    assert all(row["ppo_ratio_first"] == pytest.approx(1.0, abs=1e-5) for row in rows)
    assert asyncio.run(gap(services)) < 1e-4


async def gap(services):
    """Distance between what the engine says of a completion and what the learner does."""
    prompt = (5, 6, 7, 8)
    async with (
        RolloutClient(services["rollout"]) as rollout,
        LearnerClient(services["learner"]) as learner,
    ):
        result = await rollout.generate(
            request_id=os.urandom(8).hex(),
            groups=[PromptGroup(group_id="g", prompt_token_ids=prompt, num_samples=1)],
            sampling=SamplingParams(max_new_tokens=16, ignore_eos=True),
        )
        (completion,) = result.groups[0].completions
        tokens = [*prompt, *completion.token_ids.tolist()]
        (seen,) = await learner.forward(
            [SequenceBatch.of([tokens], ["s"])], output=ForwardOutput.LOGPROBS
        )
    return float(abs(seen.output[len(prompt) :] - completion.logprobs).max())

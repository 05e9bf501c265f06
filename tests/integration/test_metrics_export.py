"""What services export on --metrics.port agrees with what a run says of itself."""

import asyncio
import io
import json
import os
import subprocess
import sys
import urllib.request
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quartet.config import (
    ActorConfig,
    CriticConfig,
    MetricsConfig,
    PpoConfig,
    PpoDsConfig,
    PromptDataConfig,
    RewardConfig,
    RolloutConfig,
)
from quartet.obs.progress import Progress
from quartet.rpc.probe import probe
from quartet.trainer.launch import Launcher
from quartet.trainer.services import local_services

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

NUM_STEPS = 2
ROOMS = {"critic": "learner"}


class Exported:
    """The metrics of one process at one moment."""

    def __init__(self, address):
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            families = text_string_to_metric_families(answer.read().decode())
            self._samples = [sample for family in families for sample in family.samples]

    def all(self, name, **labels):
        """Values of every series of a metric that has these labels."""
        return [
            sample.value
            for sample in self._samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]

    def total(self, name, **labels):
        """Their sum; there is at least one."""
        values = self.all(name, **labels)
        assert values, f"{name} {labels} is not exported"
        return sum(values)


@pytest.fixture(scope="module")
def scene(tmp_path_factory, tiny_model_dir, tiny_reward_model_dir):
    """Rows of a short run's metrics.jsonl, and what each service exports after it, by role."""
    folder = tmp_path_factory.mktemp("metrics")
    config = PpoConfig(
        actor=ActorConfig(model_name_or_path=str(tiny_model_dir)),
        critic=CriticConfig(model_name_or_path=str(tiny_reward_model_dir)),
        reward=RewardConfig(model_name_or_path=str(tiny_reward_model_dir)),
        rollout=RolloutConfig(micro_batch_size=4),
        data=PromptDataConfig(max_len=64),
        ds=PpoDsConfig(param_dtype="fp32"),
        metrics=MetricsConfig(port=9),
    )

    async def serves(address):
        return await probe(address) == "SERVING"

    with asyncio.Runner() as runner:
        progress = Progress(stream=io.StringIO())
        # Calls are done when the trainer has gone: nothing is to be waited for at the end.
        services = [replace(service, drain_seconds=1) for service in local_services(config)]
        launcher = Launcher(folder, services, probe=serves, progress=progress)
        try:
            addresses = runner.run(launcher.start())
            rows = run_ppo(folder, str(tiny_model_dir), addresses)
            yield rows, {role: Exported(metrics_address(folder, role)) for role in addresses}
        finally:
            runner.run(launcher.stop())
            progress.close()


def metrics_address(folder, role):
    return json.loads((folder / "services" / f"{role}.ready").read_text())["metrics_address"]


def run_ppo(folder, model, addresses):
    prompts = folder / "prompts.jsonl"
    rows = [{"input": f"What is {i} + {i + 1}?"} for i in range(4 * NUM_STEPS)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [
        *("--actor.model_name_or_path", model, "--data.prompt_dataset", str(prompts)),
        *("--run.dir", str(folder), "--run.name", "run", "--ckpt.output_dir", f"{folder}/model"),
        *("--data.max_len", "64", "--rollout.max_new_tokens", "8"),
        *("--rollout.batch_size", "4", "--rollout.n_samples_per_prompt", "2"),
        *("--train.batch_size", "4", "--train.micro_batch_size", "4"),
        *("--rollout.micro_batch_size", "4", "--ds.param_dtype", "fp32"),
    ]
    for role, address in addresses.items():
        flags += [f"--{role}.address", address]
    done = subprocess.run(
        [sys.executable, "-m", "quartet", "train", "ppo", *flags],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == NUM_STEPS
    return [json.loads(line) for line in lines]


def over_samples(rows, name):
    """Sum over all samples of a run of what the rows give the mean of."""
    return sum(row[name] * row["rollout/num_samples"] for row in rows)


def test_generated_and_trained_tokens_are_those_of_the_run(scene):
    rows, exported = scene
    tokens = over_samples(rows, "response_length")
    assert tokens > 0
    for role, name in {
        "rollout": "quartet_rollout_generated_tokens_total",
        "learner": "quartet_learner_trained_tokens_total",
        "critic": "quartet_learner_trained_tokens_total",
    }.items():
        assert exported[role].total(name) == pytest.approx(tokens), role


def test_steps_scores_and_evaluations_are_those_of_the_run(scene):
    rows, exported = scene
    for role, name in {
        "learner": "actor_optimizer_steps",
        "critic": "critic_optimizer_steps",
    }.items():
        steps = sum(row[name] for row in rows)
        room = exported[role]
        assert room.total("quartet_learner_optimizer_steps_total", applied="true") == steps
        assert room.total("quartet_learner_step_duration_seconds_count") == steps
    samples = sum(row["rollout/num_samples"] for row in rows)
    assert exported["reward"].total("quartet_reward_scored_samples_total") == samples
    assert exported["reward"].all("quartet_reward_failed_samples_total") == []
    tokens = over_samples(rows, "total_length")
    assert exported["ref"].total("quartet_ref_evaluated_tokens_total") == pytest.approx(tokens)


def test_policy_version_is_the_number_of_pushes(scene):
    _, exported = scene
    pushes = 1 + NUM_STEPS
    assert exported["learner"].total("quartet_policy_version") == pushes
    assert exported["rollout"].total("quartet_policy_version") == pushes
    assert exported["critic"].total("quartet_policy_version") == 0
    for phase in ("prepare", "transfer", "commit"):
        name = "quartet_weights_push_duration_seconds_count"
        assert exported["learner"].total(name, phase=phase) == pushes
    assert exported["learner"].total("quartet_weights_pushed_bytes_total") % pushes == 0
    committed = {"method": "CommitWeights", "code": "OK"}
    name = "quartet_rpc_call_duration_seconds_count"
    assert exported["rollout"].total(name, **committed) == pushes


@pytest.mark.parametrize("role", ["rollout", "reward", "ref", "learner", "critic"])
def test_calls_are_counted_timed_and_over(scene, role):
    _, exported = scene
    room = ROOMS.get(role, role)
    ours = {"service": f"quartet.api.{room}.v1.{room.title()}Service"}
    started = exported[role].total("quartet_rpc_started_calls_total", **ours)
    ended = exported[role].total("quartet_rpc_call_duration_seconds_count", **ours, code="OK")
    assert started == ended > 0
    assert exported[role].total("quartet_rpc_call_duration_seconds_sum", **ours) > 0
    assert exported[role].total("quartet_rpc_in_flight_calls", **ours) == 0


@pytest.mark.parametrize(
    ("role", "queue"),
    [
        ("rollout", "rollout"),
        ("reward", "reward"),
        ("reward", "reward-model"),
        ("ref", "ref-model"),
        ("learner", "learner"),
        ("critic", "learner"),
    ],
)
def test_nothing_waits_when_the_run_is_over(scene, role, queue):
    _, exported = scene
    assert exported[role].all("quartet_queue_depth", queue=queue) == [0]


def test_train_calls_are_the_optimizer_steps(scene):
    rows, exported = scene
    calls = exported["learner"].total("quartet_rpc_started_calls_total", method="Train")
    assert calls == sum(row["actor_optimizer_steps"] for row in rows)
    assert exported["rollout"].total("quartet_rollout_completions_in_flight") == 0

"""PPO over real service processes: what must hold before the first update and after the last."""

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from quartet.clients import RolloutClient
from quartet.config import (
    ActorConfig,
    CriticConfig,
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
from quartet.types import PromptGroup, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

COMMON = [
    *("--data.max_len", "64", "--rollout.max_new_tokens", "8"),
    *("--rollout.batch_size", "4", "--rollout.n_samples_per_prompt", "2"),
    *("--train.batch_size", "5", "--train.micro_batch_size", "4"),
    *("--rollout.micro_batch_size", "4", "--ds.param_dtype", "fp32"),
    *("--actor.adam.lr", "1e-3", "--critic.adam.lr", "1e-3", "--actor.entropy_coef", "0"),
    "--train.full_determinism_enable",
]


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def train(*flags, check=True):
    """Run `quartet train ppo` to its end."""
    done = subprocess.run(
        [sys.executable, "-m", "quartet", "train", "ppo", *flags],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=300,
        check=False,
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    rows = [{"input": f"What is {i} + {i + 1}?", "label": str(2 * i + 1)} for i in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def services(tmp_path_factory, tiny_model_dir, tiny_reward_model_dir):
    """Addresses of five services that stand by themselves, as in five terminals."""
    folder = tmp_path_factory.mktemp("services")
    config = PpoConfig(
        actor=ActorConfig(model_name_or_path=str(tiny_model_dir)),
        critic=CriticConfig(model_name_or_path=str(tiny_reward_model_dir)),
        reward=RewardConfig(model_name_or_path=str(tiny_reward_model_dir)),
        rollout=RolloutConfig(micro_batch_size=4),
        train=PpoTrainConfig(full_determinism_enable=True),
        data=PromptDataConfig(max_len=64),
        ds=PpoDsConfig(param_dtype="fp32"),
    )

    async def serves(address):
        return await probe(address) == "SERVING"

    with asyncio.Runner() as runner:
        progress = Progress(stream=io.StringIO())
        launcher = Launcher(folder, local_services(config), probe=serves, progress=progress)
        try:
            yield runner.run(launcher.start())
        finally:
            runner.run(launcher.stop())
            progress.close()


class Runs:
    """Trainer runs against the services, each made once."""

    def __init__(self, folder, services, model, prompts_file):
        self.folder = folder
        self.flags = [
            *("--actor.model_name_or_path", str(model)),
            *("--data.prompt_dataset", str(prompts_file), "--run.dir", str(folder)),
            *COMMON,
        ]
        for role, address in services.items():
            self.flags += [f"--{role}.address", address]
        self.done = set()

    def metrics(self, name, *flags):
        """The bytes of metrics.jsonl of the run `name`."""
        if name not in self.done:
            output = ["--ckpt.output_dir", str(self.folder / name / "model")]
            train(*self.flags, "--run.name", name, *output, *flags)
            self.done.add(name)
        return (self.folder / name / "metrics.jsonl").read_bytes()

    def rows(self, name, *flags):
        return [json.loads(line) for line in self.metrics(name, *flags).splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, services, tiny_model_dir, prompts_file):
    return Runs(tmp_path_factory.mktemp("runs"), services, tiny_model_dir, prompts_file)


COLD = ("--rollout.temperature", "0.7", "--train.seed", "3")


@pytest.mark.parametrize(("name", "flags"), [("first", ()), ("cold", COLD)])
def test_before_the_first_update_all_models_agree(runs, name, flags):
    first = runs.rows(name, *flags)[0]
    assert first["kl"] == pytest.approx(0.0, abs=1e-6)
    assert first["logprobs_diff"] == pytest.approx(0.0, abs=1e-6)
    assert first["ppo_ratio_first"] == pytest.approx(1.0, abs=1e-6)
    assert first["rollout_logprob_gap"] < 1e-4


def test_policy_moves_and_the_engine_follows(runs):
    first, second = runs.rows("first")
    assert second["kl"] != 0.0
    assert second["rollout_logprob_gap"] < 1e-4
    assert second["policy_version"] == first["policy_version"] + 1
    for row in (first, second):
        # 8 samples in optimizer steps of 5: a step of 5 and one of 3, for both learners.
        assert row["actor_optimizer_steps"] == row["critic_optimizer_steps"] == 2
        assert row["num_samples_trained"] == 8
        assert row["entropy_loss"] > 0
        assert np.isfinite([v for k, v in row.items() if k != "kind"]).all()


def test_engine_and_exported_model_choose_the_same_tokens(runs, services, tiny_model_dir):
    import torch
    from transformers import AutoModelForCausalLM

    from quartet.data import load_tokenizer

    assert "again" not in runs.done  # so the newest push is that of this run
    runs.rows("again")
    model = AutoModelForCausalLM.from_pretrained(runs.folder / "again" / "model").eval()
    prompt = load_tokenizer(tiny_model_dir).encode("What is 5 + 6?")

    async def ask():
        async with RolloutClient(services["rollout"]) as client:
            result = await client.generate(
                request_id="greedy",
                groups=[PromptGroup(group_id="g", prompt_token_ids=tuple(prompt), num_samples=1)],
                sampling=SamplingParams(temperature=0.0, max_new_tokens=16, ignore_eos=True),
            )
            return result.groups[0].completions[0].token_ids.tolist()

    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(16):
            logits = model(torch.tensor([tokens])).logits[0, -1]
            tokens.append(int(logits.argmax()))
    assert asyncio.run(ask()) == tokens[len(prompt) :]


def test_same_seed_same_metrics_other_seed_others(runs):
    assert runs.metrics("first") == runs.metrics("again")
    assert runs.metrics("first") != runs.metrics("cold", *COLD)


def test_nothing_that_depends_on_the_clock_is_in_the_metrics(runs):
    names = set().union(*runs.rows("first"))
    assert not [n for n in names if n.startswith("timing/") or n.endswith("_per_second")]
    timings = (runs.folder / "first" / "timings.jsonl").read_text().splitlines()
    assert "timing/step_total" in json.loads(timings[0])


def test_settings_saved_with_the_run_hold_no_secret(runs):
    flags = ("--train.seed", "5", "--train.max_steps", "1")
    name = "secret"
    os.environ["QUARTET_LOGGER__WANDB__KEY"] = "very-secret-key"
    os.environ["WANDB_MODE"] = "offline"
    try:
        runs.rows(name, *flags)
    finally:
        del os.environ["QUARTET_LOGGER__WANDB__KEY"], os.environ["WANDB_MODE"]
    folder = runs.folder / name
    holders = [
        path
        for path in folder.rglob("*")
        if path.is_file() and b"very-secret-key" in path.read_bytes()
    ]
    assert holders == []
    assert list(folder.glob("wandb/offline-run-*"))


def test_wrong_address_is_one_line(runs):
    flags = [*runs.flags, "--launch.connect_timeout", "0.5", "--run.name", "wrong"]
    # The reward service's address given as that of the reference.
    reward = flags[flags.index("--reward.address") + 1]
    flags[flags.index("--ref.address") + 1] = reward
    done = train(*flags, check=False)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert reward in last
    assert "is no ref service" in last


def test_grpo_with_a_reward_file_and_local_services(tmp_path, tiny_model_dir, prompts_file):
    """Without reward model, critic and reference; the trainer starts what is left."""
    (tmp_path / "my_reward.py").write_text(
        "def reward_func(queries, prompts, labels, **kwargs):\n"
        "    found = [float(len(q) - len(p)) for q, p in zip(queries, prompts)]\n"
        "    return {'rewards': found, 'scores': found, 'extra_logs': {'characters': found}}\n"
    )
    done = train(
        *("--actor.model_name_or_path", str(tiny_model_dir)),
        *("--data.prompt_dataset", str(prompts_file), "--data.label_key", "label"),
        *("--reward.remote_url", str(tmp_path / "my_reward.py")),
        *("--algo.advantage.estimator", "group_norm", "--algo.kl.init_coef", "0"),
        *(
            "--run.dir",
            str(tmp_path),
            "--run.name",
            "grpo",
            "--ckpt.output_dir",
            str(tmp_path / "m"),
        ),
        *COMMON,
    )
    assert done.stdout.strip().splitlines()[-1] == f"finished: {tmp_path}/grpo"
    rows = [json.loads(x) for x in (tmp_path / "grpo/metrics.jsonl").read_text().splitlines()]
    assert [row["characters"] == row["reward"] for row in rows] == [True, True]
    assert "kl" not in rows[0]
    assert "critic_loss" not in rows[0]
    assert rows[0]["group_reward_std"] > 0
    assert {p.stem for p in (tmp_path / "grpo/logs").iterdir()} == {"learner", "rollout", "reward"}
    assert processes_of(tmp_path) == []


async def test_ctrl_c_and_sigkill_leave_no_service(tmp_path, tiny_model_dir, prompts_file):
    (tmp_path / "r.py").write_text(
        "import time\n"
        "def reward_func(queries, prompts, labels, **kwargs):\n"
        f"    open({str(tmp_path / 'scoring')!r}, 'w').close()\n"
        "    time.sleep(600)\n"
    )
    for name, number in (("interrupted", signal.SIGINT), ("killed", signal.SIGKILL)):
        (tmp_path / "scoring").unlink(missing_ok=True)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "quartet", "train", "ppo"),
            *("--actor.model_name_or_path", str(tiny_model_dir)),
            *("--data.prompt_dataset", str(prompts_file)),
            *("--reward.remote_url", str(tmp_path / "r.py")),
            *("--algo.advantage.estimator", "group_norm", "--algo.kl.init_coef", "0"),
            *("--run.dir", str(tmp_path), "--run.name", name),
            *("--ckpt.output_dir", str(tmp_path / "m")),
            *COMMON,
            env=environment(),
            stderr=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
        )
        async with asyncio.timeout(180):
            while not (tmp_path / "scoring").exists():
                assert process.returncode is None
                await asyncio.sleep(0.1)
            assert processes_of(tmp_path)
            process.send_signal(number)
            _, err = await process.communicate()
            if number == signal.SIGINT:
                assert process.returncode == 130
                last = err.decode().strip().splitlines()[-1]
                assert last == "interrupted; no service was left behind"
                assert processes_of(tmp_path) == []
            while processes_of(tmp_path):  # noqa: ASYNC110 - the kernel tells the services
                await asyncio.sleep(0.1)


def processes_of(folder):
    """Processes with a path below `folder` on their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(folder).encode() in command and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


def test_a_policy_and_a_critic_with_adapters(
    tmp_path, tiny_model_dir, tiny_reward_model_dir, prompts_file
):
    """Two rollouts: the engine follows merged weights, and what is exported is what it serves."""
    from transformers import AutoModelForCausalLM

    train(
        *("--actor.model_name_or_path", str(tiny_model_dir)),
        *("--reward.model_name_or_path", str(tiny_reward_model_dir)),
        *("--critic.model_name_or_path", str(tiny_reward_model_dir), "--critic.save_value_network"),
        *("--data.prompt_dataset", str(prompts_file), "--ds.lora.rank", "4"),
        *("--run.dir", str(tmp_path), "--run.name", "lora", "--train.max_steps", "2"),
        *("--ckpt.output_dir", str(tmp_path / "model")),
        *COMMON,
    )
    lines = (tmp_path / "lora" / "metrics.jsonl").read_text().splitlines()
    first, second = (json.loads(line) for line in lines)
    assert first["kl"] == pytest.approx(0.0, abs=1e-6)
    assert first["ppo_ratio_first"] == pytest.approx(1.0, abs=1e-6)
    assert second["kl"] != 0.0
    for row in (first, second):
        assert row["rollout_logprob_gap"] < 1e-4
        assert row["actor_optimizer_steps"] == row["critic_optimizer_steps"] == 2
    said = (tmp_path / "lora" / "logs" / "learner.log").read_text()
    assert "training adapters (rank 4 on " in said
    before = AutoModelForCausalLM.from_pretrained(tiny_model_dir).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert before.keys() == after.keys()
    moved = {name for name in before if not before[name].equal(after[name])}
    assert moved == {name for name in before if name.endswith("_proj.weight")}
    assert list((tmp_path / "model" / "adapter").glob("adapter_model.safetensors"))

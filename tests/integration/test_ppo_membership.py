"""Rollout services that come and go in the middle of a run, by a file of addresses."""

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
import sys

import pytest

from quartet.clients import RolloutClient
from quartet.types import PauseMode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ENV = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
PROMPTS, SAMPLES, STEPS = 16, 4, 4
AHEAD = ("--train.async_enable", "--train.partial_rollout_enable")


class Rollouts:
    """Rollout processes, and the file that lists them."""

    def __init__(self, folder, model):
        self.folder, self.model = folder, model
        self.list_file = folder / "rollouts"
        self.processes = {}

    async def start(self, name):
        ready = self.folder / f"{name}.ready"
        self.processes[name] = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "quartet", "serve", "rollout", "--rpc.port", "0"),
            *("--rollout.model_name_or_path", str(self.model), "--rollout.engine", "transformers"),
            *("--data.max_len", "64", "--ds.param_dtype", "fp32", "--rpc.ready_file", str(ready)),
            env=ENV,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        async with asyncio.timeout(500):
            while not ready.exists():
                assert process.returncode is None
                await asyncio.sleep(0.05)
        return json.loads(ready.read_text())["address"]

    def list(self, *addresses):
        """As a user should: written aside, and renamed."""
        aside = self.list_file.with_suffix(".new")
        aside.write_text("".join(f"{address}\n" for address in addresses))
        aside.rename(self.list_file)

    async def stop(self):
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


class Run:
    """A GRPO run whose rollout services are those of a list."""

    def __init__(self, folder, model, rollouts):
        self.folder, self.model, self.rollouts = folder, model, rollouts

    async def start(self, *flags):
        prompts, reward = self.folder / "prompts.jsonl", self.folder / "my_reward.py"
        prompts.write_text(
            "".join(json.dumps({"input": f"Say {i}."}) + "\n" for i in range(PROMPTS))
        )
        reward.write_text(
            "def reward_func(queries, prompts, labels, **kwargs):\n"
            "    return {'rewards': [float(q.count('e')) for q in queries]}\n"
        )
        with (self.folder / "out").open("wb") as out:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "quartet", "train", "ppo"),
                *("--actor.model_name_or_path", str(self.model), "--ds.param_dtype", "fp32"),
                *("--data.prompt_dataset", str(prompts), "--reward.remote_url", str(reward)),
                *("--rollout.address", f"file://{self.rollouts.list_file}"),
                *("--algo.advantage.estimator", "group_norm", "--algo.kl.init_coef", "0"),
                *("--data.max_len", "64", "--rollout.batch_size", str(PROMPTS // STEPS)),
                *("--rollout.n_samples_per_prompt", str(SAMPLES), "--actor.adam.lr", "1e-3"),
                *("--train.batch_size", "16", "--train.micro_batch_size", "16"),
                *("--run.dir", str(self.folder), "--run.name", "run"),
                *("--ckpt.output_dir", str(self.folder / "model"), *flags),
                env=ENV,
                stdout=out,
                stderr=out,
            )

    @property
    def out(self):
        return (self.folder / "out").read_text()

    async def until(self, condition):
        """Wait for what is seen from outside only."""
        async with asyncio.timeout(500):
            while not await condition():
                assert self.process.returncode is None, self.out
                await asyncio.sleep(0.05)

    async def said(self, text):
        async def is_said():
            return text in self.out

        await self.until(is_said)

    async def stop(self):
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()

    async def finish(self):
        await self.process.wait()
        assert self.process.returncode == 0, self.out

    def rows(self, sql):
        with contextlib.closing(sqlite3.connect(self.folder / "run/ledger.sqlite")) as db:
            return db.execute(sql).fetchall()

    def metrics(self):
        lines = (self.folder / "run/metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.mark.parametrize("flags", [(), AHEAD], ids=["in turn", "partial"])
async def test_rollouts_are_killed_replaced_and_taken_away(tmp_path, tiny_model_dir, flags):
    rollouts = Rollouts(tmp_path, tiny_model_dir)
    run = Run(tmp_path, tiny_model_dir, rollouts)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(rollouts.stop)
        names = ("killed", "leaves")
        addresses = await asyncio.gather(*(rollouts.start(name) for name in names))
        killed, leaves = [
            await stack.enter_async_context(RolloutClient(address)) for address in addresses
        ]
        rollouts.list(*addresses)
        await run.start(*flags)
        stack.push_async_callback(run.stop)

        async def holds(client):
            return (await client.get_info()).completions_in_flight > 0

        async def is_pushed(client):
            return (await client.get_info()).policy_version > 0

        # Killed in the middle of completions. The other is held, so the run stands still.
        await run.until(lambda: is_pushed(killed))
        await asyncio.gather(killed.pause(PauseMode.KEEP), leaves.pause(PauseMode.KEEP))
        await run.until(lambda: holds(killed))
        rollouts.processes["killed"].send_signal(signal.SIGKILL)
        await run.until(lambda: holds(leaves))
        # It is started again elsewhere: it has nothing, until it has been pushed to alone.
        address = await rollouts.start("new")
        new = await stack.enter_async_context(RolloutClient(address))
        assert not await is_pushed(new)
        rollouts.list(leaves.address, address)
        await run.until(lambda: is_pushed(new))
        # And the second one leaves: what it holds ends there, and nothing new comes.
        rollouts.list(address)
        await run.said(f"rollout at {leaves.address} is off the list")
        version = (await leaves.get_info()).policy_version
        await leaves.resume()
        await run.finish()

        replicas = dict(run.rows("SELECT replica, COUNT(*) FROM samples GROUP BY replica"))
        info = await new.get_info()
        assert replicas[info.info.replica] > 0
        # The push at the start, and one after each step: it missed none.
        assert info.policy_version == STEPS + 1
        assert (await leaves.get_info()).policy_version == version <= STEPS
        assert (await leaves.get_info()).completions_in_flight == 0
    # Nothing was lost, and nothing done twice.
    assert run.rows("SELECT state, COUNT(*) FROM samples GROUP BY state") == [
        ("trained", PROMPTS * SAMPLES)
    ]
    trained = [
        name
        for (ids,) in run.rows("SELECT sample_ids FROM optimizer_steps")
        for name in json.loads(ids)
    ]
    assert len(trained) == len(set(trained)) == PROMPTS * SAMPLES
    assert [m["num_samples_trained"] for m in run.metrics()] == [PROMPTS * SAMPLES / STEPS] * STEPS
    # No token is of weights that were never pushed, or are older than allowed.
    oldest = run.rows(
        "SELECT MIN(first_policy_version), MAX(steps.policy_version - first_policy_version) "
        "FROM samples JOIN steps USING (step)"
    )
    assert oldest[0][0] >= 1
    if flags:
        assert all(m["staleness/max"] <= 1 for m in run.metrics())
    else:
        assert oldest[0][1] == 0
        assert all(m["rollout_logprob_gap"] < 1e-4 for m in run.metrics())

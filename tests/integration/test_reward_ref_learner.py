"""Learner, ref and reward agree on one model: each reads what the others read and wrote."""

import asyncio
import contextlib
import json
import os
import sys

import numpy as np
import pytest

from quartet.clients import LearnerClient, RefClient, RewardClient
from quartet.types import (
    ForwardOutput,
    OptimizerConfig,
    PairwiseLoss,
    RunSpec,
    ScheduleConfig,
    ScoreItem,
    SequenceBatch,
    TrainSamples,
    TrainStep,
)

pytestmark = pytest.mark.slow

RUN = RunSpec(
    run_id="run",
    optimizer=OptimizerConfig(lr=1e-2),
    schedule=ScheduleConfig(name="constant", total_steps=10),
)


@contextlib.asynccontextmanager
async def serve(folder, *arguments):
    """`quartet serve ...` in a process of its own; yields its address."""
    ready = folder / f"{arguments[0]}.json"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "quartet", "serve", *arguments),
        *("--rpc.ready_file", str(ready), "--rpc.drain_seconds", "1", "--ds.param_dtype", "fp32"),
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        async with asyncio.timeout(90):
            while not ready.exists():
                assert process.returncode is None
                await asyncio.sleep(0.02)
        yield json.loads(ready.read_text())["address"]
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await asyncio.wait_for(process.wait(), 30)


@pytest.fixture
def batch():
    random = np.random.default_rng(0)
    return SequenceBatch.of([random.integers(3, 384, n).tolist() for n in (3, 17, 40, 1, 8)])


async def train_pairs(learner, batch, steps=3):
    pairs = SequenceBatch.of([row.tolist() for row in list(batch.rows())[:4]])
    for number in range(steps):
        step = TrainStep(
            request_id=f"step{number}",
            run_id=RUN.run_id,
            loss=PairwiseLoss(),
            expected_optimizer_steps=number,
            max_tokens_per_micro_batch=128,
        )
        assert (await learner.train(step, [TrainSamples(sequences=pairs)])).applied


async def test_ref_and_learner_give_the_same_logprobs(tmp_path, tiny_model_dir, batch):
    model = str(tiny_model_dir)
    async with (
        serve(tmp_path, "learner", "--learner.model_name_or_path", model) as learner_at,
        serve(tmp_path, "ref", "--ref.model_name_or_path", model) as ref_at,
        LearnerClient(learner_at) as learner,
        RefClient(ref_at) as ref,
    ):
        await asyncio.gather(learner.wait_ready(90), ref.wait_ready(90))
        await learner.start_run(RUN)
        for temperature in (1.0, 0.7):
            [policy] = await learner.forward(
                [batch], output=ForwardOutput.LOGPROBS, temperature=temperature
            )
            [reference] = await ref.compute_logprobs([batch], temperature=temperature)
            np.testing.assert_allclose(reference, policy.output, rtol=0, atol=1e-6)
        infos = await asyncio.gather(learner.get_info(), ref.get_info())
        assert infos[0].info.tokenizer_fingerprint == infos[1].info.tokenizer_fingerprint != ""


@pytest.mark.parametrize("rank", [0, 4])
async def test_reward_scores_what_a_learner_exports_as_the_learner_does(
    tmp_path, tiny_reward_model_dir, batch, rank
):
    exported = tmp_path / "exported"
    flags = (
        *("--learner.model_name_or_path", str(tiny_reward_model_dir), "--learner.head", "reward"),
        *("--ds.lora.rank", str(rank)),
    )
    async with serve(tmp_path, "learner", *flags) as address, LearnerClient(address) as learner:
        await learner.wait_ready(90)
        await learner.start_run(RUN)
        if rank:
            # Adapters and head move, and both are in what is exported.
            await train_pairs(learner, batch)
        [rewards] = await learner.forward([batch], output=ForwardOutput.REWARDS)
        await learner.export_model(
            folder=str(exported), config_values={"mean": 0.25, "std": 2.0}, request_id="e"
        )
    source = ("--reward.model_name_or_path", str(exported), "--reward.normalize_enable")
    async with serve(tmp_path, "reward", *source) as address, RewardClient(address) as reward:
        await reward.wait_ready(90)
        info = await reward.get_info()
        items = [
            ScoreItem(sample_id=f"s{i}", prompt="", query="", token_ids=tuple(row.tolist()))
            for i, row in enumerate(batch.rows())
        ]
        scored = await reward.score(
            request_id="r",
            items=items,
            tokenizer_fingerprint=info.info.tokenizer_fingerprint,
        )
    got = [result.outcome.reward for result in scored.results]
    np.testing.assert_allclose(got, (rewards.output - 0.25) / 2.0, rtol=0, atol=1e-6)

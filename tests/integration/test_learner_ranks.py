"""Two ranks over gloo, as real processes: they train like one, push, and end together."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from quartet_learner.server import LearnerService
from quartet_learner.settings import LearnerSettings
from quartet_rollout.server import RolloutService
from safetensors.torch import load_file

from quartet.clients import LearnerClient, RolloutClient
from quartet.config import RolloutServeConfig
from quartet.config.ds import LoadConfig
from quartet.config.sampling import RolloutEngineConfig
from quartet.errors import InfraError
from quartet.testing.loopback import loopback
from quartet.types import (
    Head,
    KlLoss,
    OptimizerConfig,
    PairwiseLoss,
    PolicyLoss,
    PromptGroup,
    RunSpec,
    SamplingParams,
    ScheduleConfig,
    SequenceBatch,
    TrainSamples,
    TrainStep,
    ValueLoss,
)
from quartet.weights import WeightInbox

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

LR = 1e-3
SPEC = RunSpec(
    run_id="run",
    optimizer=OptimizerConfig(lr=LR),
    schedule=ScheduleConfig(name="constant", total_steps=10),
    ema_beta=0.5,
)
POLICY = PolicyLoss(entropy_coef=0.01, kl_loss=KlLoss(coef=0.1, estimator="k3"), temperature=0.9)


def make_samples(lengths: tuple[int, ...]) -> TrainSamples:
    rng = np.random.default_rng(sum(lengths))
    sequences = SequenceBatch.of([rng.integers(3, 300, n).tolist() for n in lengths])
    n = sequences.num_tokens
    mask = rng.random(n) < 0.7
    mask[sequences.offsets[1:] - 1] = True
    mask[sequences.offsets[:-1]] = False

    def numbers(mean: float) -> np.ndarray:
        return rng.normal(mean, 0.3, n).astype(np.float32)

    old = numbers(-6)
    return TrainSamples(
        sequences=sequences,
        action_mask=mask,
        advantages=numbers(0),
        old_logprobs=old,
        ref_logprobs=old + 0.1 * numbers(0),
        returns=numbers(0),
        old_values=numbers(0),
    )


STEPS = (
    make_samples((5, 9, 3, 12, 7, 7, 4, 10)),
    # Fewer samples than ranks: one rank has nothing to do.
    make_samples((6,)),
    make_samples((3, 30, 3, 3, 3, 5)),
)
PAIRED_STEPS = (STEPS[0], make_samples((6, 4)), STEPS[2])


def step_of(number: int, loss) -> TrainStep:
    return TrainStep(
        request_id=f"step{number}",
        run_id="run",
        loss=loss,
        expected_optimizer_steps=number,
        max_tokens_per_micro_batch=60,
    )


async def train(learner: LearnerClient, loss, steps, folder: Path):
    """All steps, and the average of the weights over them."""
    await learner.start_run(SPEC)
    results = [await learner.train(step_of(n, loss), [samples]) for n, samples in enumerate(steps)]
    outputs = await learner.forward([STEPS[0].sequences, STEPS[1].sequences])
    exported = await learner.export_model(folder=str(folder))
    weights = load_file(Path(exported.path) / "model.safetensors")
    return results, outputs, weights


async def refused_on_both_ranks(learner: LearnerClient, loss, number: int) -> None:
    """The gradient of one sample, on one of the ranks, is not finite: no rank takes the step."""
    samples = STEPS[0]
    first = np.arange(samples.sequences.num_tokens) < samples.sequences.lengths[0]
    broken = {
        "advantages": np.where(first, -3e38, samples.advantages),
        "old_logprobs": np.where(first, -20.0, samples.old_logprobs),
        "returns": np.where(first, 3e38, samples.returns),
    }
    broken = {name: array.astype(np.float32) for name, array in broken.items()}
    before = await learner.forward([samples.sequences])
    refused = await learner.train(step_of(number, loss), [replace(samples, **broken)])
    assert not refused.applied
    assert refused.optimizer_steps == number
    assert not np.isfinite(refused.grad_norm)
    after = await learner.forward([samples.sequences])
    np.testing.assert_array_equal(after[0].output, before[0].output)
    good = replace(step_of(number, loss), request_id="after")
    assert (await learner.train(good, [samples])).applied


@contextlib.asynccontextmanager
async def serve(tmp_path: Path, model: Path, **flags) -> AsyncIterator[tuple]:
    """`quartet serve learner` with two ranks; yields process and client, leaves nothing behind."""
    ready = tmp_path / "ready.json"
    flags = {"learner.num_ranks": 2, "ds.param_dtype": "fp32", **flags}
    log = tmp_path / "learner.log"
    with log.open("wb") as sink:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "quartet", "serve", "learner"),
            *("--rpc.port", "0", "--rpc.ready_file", str(ready)),
            *("--learner.model_name_or_path", str(model)),
            *(
                text
                for name, value in flags.items()
                for text in ((f"--{name}",) if value is True else (f"--{name}", str(value)))
            ),
            stderr=sink,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    others: list[int] = []
    try:
        async with asyncio.timeout(60):
            while not ready.exists() and process.returncode is None:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        if not ready.exists():
            pytest.fail(log.read_text())
        address = json.loads(ready.read_text())["address"]
        async with LearnerClient(address) as client:
            await client.wait_ready(120)
            others = children_of(process.pid)
            yield process, client, others
    finally:
        if process.returncode is None:
            process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(30):
                await process.wait()
        if process.returncode is None:
            process.kill()
        await gone(others)


def children_of(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


async def gone(pids: list[int], seconds: float = 20) -> None:
    def alive(pid: int) -> bool:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        return False

    async with asyncio.timeout(seconds):
        while any(map(alive, pids)):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


PACKED = {"ds.packing_samples": True}
ADAPTERS = {"ds.lora.rank": 4}
RING = {"ds.ring_attn_size": 2, "ds.ring_attn_head_stride": 2, **PACKED}
TENSOR = {"ds.tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("stage", "head", "loss", "more"),
    [
        (0, Head.REWARD, PairwiseLoss(), {}),
        (2, Head.VALUE, ValueLoss(), PACKED),
        (3, Head.LM, POLICY, {}),
        (2, Head.REWARD, PairwiseLoss(), ADAPTERS),
        (0, Head.REWARD, PairwiseLoss(), RING),
        (3, Head.LM, replace(POLICY, type="gspo"), RING),
        (2, Head.LM, POLICY, TENSOR),
        (3, Head.VALUE, ValueLoss(), TENSOR),
    ],
)
async def test_two_ranks_train_like_one(tmp_path, tiny_model_dir, stage, head, loss, more):
    steps = PAIRED_STEPS if head is Head.REWARD else STEPS
    rank = more.get("ds.lora.rank", 0)
    one_rank = LearnerService(
        LearnerSettings(model_name_or_path=str(tiny_model_dir), head=head, lora_rank=rank)
    )
    async with loopback(one_rank) as address, LearnerClient(address) as client:
        expected = await train(client, loss, steps, tmp_path / "one")
    flags = {"ds.zero_stage": stage, "learner.head": head, **more}
    async with serve(tmp_path, tiny_model_dir, **flags) as (process, client, others):
        assert (await client.get_info()).world_size == 2
        assert len(others) == 1
        got = await train(client, loss, steps, tmp_path / "two")
        if head is not Head.REWARD:
            await refused_on_both_ranks(client, loss, len(steps))
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    for one, two in zip(expected[0], got[0], strict=True):
        assert two.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
        assert two.metrics == pytest.approx(one.metrics, rel=1e-4, abs=1e-5)
    # The first step starts from equal weights: there nothing but the cut differs.
    assert got[0][0].grad_norm == pytest.approx(expected[0][0].grad_norm, rel=2e-6)
    for one, two in zip(expected[1], got[1], strict=True):
        np.testing.assert_allclose(two.output, one.output, atol=5e-4)
    for name, weight in expected[2].items():
        different = (weight - got[2][name]).abs() > 0.05 * LR
        assert different.float().mean() < 0.02, name


ZERO_3 = {"ds.zero_stage": 3}


@pytest.mark.parametrize(
    "flags", [ZERO_3, ZERO_3 | ADAPTERS, TENSOR], ids=["zero 3", "adapters", "tensor"]
)
async def test_two_ranks_that_share_weights_push_save_and_continue(tmp_path, tiny_model_dir, flags):
    rollout = RolloutService(
        RolloutServeConfig(
            rollout=RolloutEngineConfig(model_name_or_path=str(tiny_model_dir)),
            ds=LoadConfig(param_dtype="fp32"),
        )
    )
    async with (
        loopback(rollout) as rollout_address,
        RolloutClient(rollout_address) as rollouts,
        serve(tmp_path, tiny_model_dir, **flags) as (
            _,
            client,
            _others,
        ),
    ):
        await rollouts.wait_ready(60)
        await client.start_run(replace(SPEC, optimizer=OptimizerConfig(lr=2e-2), ema_beta=None))
        first = await client.train(step_of(0, POLICY), [STEPS[0]])
        await client.save_checkpoint(folder=str(tmp_path / "ckpt"), tag="one")
        expected = await client.train(step_of(1, POLICY), [STEPS[2]])
        loaded = await client.load_checkpoint(folder=str(tmp_path / "ckpt"))
        assert loaded.optimizer_steps == first.optimizer_steps == 1
        again = await client.train(replace(step_of(1, POLICY), request_id="again"), [STEPS[2]])
        assert (again.grad_norm, again.metrics) == (expected.grad_norm, expected.metrics)

        pushed = await client.push_weights(
            policy_version=7, addresses=[rollout_address], bucket_bytes=64 << 10
        )
        assert [r.committed for r in pushed.replicas] == [True]
        assert pushed.num_buckets > 1
        assert (await client.get_info()).policy_version == 7
        assert (await rollouts.get_info()).policy_version == 7
        exported = await client.export_model(folder=str(tmp_path / "model"))
        prompt = (5, 6, 7, 8)
        answer = await rollouts.generate(
            request_id="g",
            groups=[PromptGroup(group_id="g", prompt_token_ids=prompt, sample_ids=("s",))],
            sampling=SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True),
        )
        tokens = answer.groups[0].completions[0].token_ids
        assert list(tokens) == greedy(exported.path, prompt, len(tokens))

        # Nobody to push to: the ranks are together again afterwards.
        with pytest.raises(InfraError, match="no replica took version 8"):
            await client.push_weights(
                policy_version=8, addresses=["127.0.0.1:1"], group_timeout=2.0
            )
        assert (await client.train(step_of(2, POLICY), [STEPS[1]])).applied


async def test_a_replica_lost_in_a_push_leaves_no_rank_in_a_gather(
    tmp_path, tiny_model_dir, monkeypatch
):
    whole = WeightInbox._receive_buckets

    async def one_bucket(inbox, push):
        async for event in whole(inbox, push):
            yield event
            raise InfraError("the engine is gone")

    rollout = RolloutService(
        RolloutServeConfig(
            rollout=RolloutEngineConfig(
                model_name_or_path=str(tiny_model_dir), engine="transformers"
            ),
            ds=LoadConfig(param_dtype="fp32"),
        )
    )
    async with (
        loopback(rollout) as address,
        RolloutClient(address) as rollouts,
        serve(tmp_path, tiny_model_dir, **ZERO_3) as (_, client, _others),
    ):
        await rollouts.wait_ready(60)
        await client.start_run(SPEC)
        with monkeypatch.context() as patch:
            patch.setattr(WeightInbox, "_receive_buckets", one_bucket)
            with pytest.raises(InfraError, match=r"no replica took version 7.*the engine is gone"):
                await client.push_weights(
                    policy_version=7, addresses=[address], bucket_bytes=16 << 10
                )
        assert (await client.train(step_of(0, POLICY), [STEPS[0]])).applied
        pushed = await client.push_weights(
            policy_version=8, addresses=[address], bucket_bytes=16 << 10
        )
        assert [r.committed for r in pushed.replicas] == [True]
        assert pushed.num_buckets > 4
        assert min(pushed.gather_seconds, pushed.pack_seconds, pushed.broadcast_seconds) > 0


def greedy(folder: str, prompt, count: int) -> list[int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


async def test_a_rank_that_dies_takes_the_learner_along(tmp_path, tiny_model_dir):
    async with serve(tmp_path, tiny_model_dir) as (process, client, others):
        await client.start_run(SPEC)
        os.kill(others[0], signal.SIGKILL)
        async with asyncio.timeout(20):
            assert await process.wait() == 1
        said = (tmp_path / "learner.log").read_text()
        assert f"rank 1 (process {others[0]}) ended with signal 9" in said


async def test_no_rank_survives_rank_0(tmp_path, tiny_model_dir):
    async with serve(tmp_path, tiny_model_dir) as (process, _, others):
        process.kill()
        await gone([*others])


async def test_settings_that_no_rank_can_honour_end_with_code_2(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "quartet", "serve", "learner", "--rpc.port", "0"),
        *("--learner.model_name_or_path", str(tmp_path)),
        *("--learner.num_ranks", "2", "--ds.param_dtype", "fp32"),
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 2
    lines = [line for line in said.decode().splitlines() if line.startswith("quartet learner:")]
    assert len(lines) == 1
    assert str(tmp_path) in lines[0]

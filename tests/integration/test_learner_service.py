"""The learner over gRPC, one rank, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from quartet_learner.server import LearnerService
from quartet_learner.settings import LearnerSettings

from quartet.clients import LearnerClient
from quartet.errors import InfraError, RequestError, StateError
from quartet.obs import metrics
from quartet.testing.loopback import loopback
from quartet.types import (
    ForwardOutput,
    Head,
    OptimizerConfig,
    PolicyLoss,
    RunSpec,
    ScheduleConfig,
    SequenceBatch,
    SftLoss,
    TrainSamples,
    TrainStep,
    ValueLoss,
)

SPEC = RunSpec(
    run_id="run",
    optimizer=OptimizerConfig(lr=1e-3),
    schedule=ScheduleConfig(name="constant", total_steps=10),
)


def make_samples(seed: int = 0, lengths=(5, 9, 3, 12)) -> TrainSamples:
    rng = np.random.default_rng(seed)
    sequences = SequenceBatch.of(
        [rng.integers(3, 300, n).tolist() for n in lengths], [f"s{i}" for i in range(len(lengths))]
    )
    mask = np.ones(sequences.num_tokens, bool)
    mask[sequences.offsets[:-1]] = False
    return TrainSamples(sequences=sequences, action_mask=mask)


def step_of(number: int, loss=None, run_id: str = "run", request_id: str = "") -> TrainStep:
    return TrainStep(
        request_id=request_id or f"step{number}",
        run_id=run_id,
        loss=loss or SftLoss(),
        expected_optimizer_steps=number,
        max_tokens_per_micro_batch=64,
    )


@pytest.fixture
async def learner(tiny_model_dir: Path) -> AsyncIterator[LearnerClient]:
    service = LearnerService(LearnerSettings(model_name_or_path=str(tiny_model_dir)))
    async with loopback(service) as address, LearnerClient(address) as client:
        await client.wait_ready(30)
        yield client


async def test_what_it_says_of_itself(learner, tiny_model_dir):
    info = await learner.get_info()
    assert (info.info.service, info.head, info.world_size) == ("learner", Head.LM, 1)
    assert info.info.tokenizer_fingerprint
    assert info.info.capabilities == ("sleep",)
    assert info.info.max_sequence_length == 512
    assert (info.run_id, info.optimizer_steps, info.policy_version) == ("", 0, 0)
    assert dict(info.manifest.aliases) == {"lm_head.weight": "model.embed_tokens.weight"}
    total = sum(int(np.prod(t.shape)) for t in info.manifest.tensors)
    assert total == info.num_parameters


async def test_a_run_from_start_to_export(learner, tmp_path):
    with pytest.raises(StateError, match="no run"):
        await learner.train(step_of(0), [make_samples()])
    assert (await learner.start_run(SPEC)).optimizer_steps == 0
    steps = [await learner.train(step_of(n), [make_samples(n), make_samples(9)]) for n in range(2)]
    assert [s.optimizer_steps for s in steps] == [1, 2]
    assert steps[0].num_samples == 8
    assert steps[0].num_action_tokens == 2 * (29 - 4)
    assert steps[0].metrics["gpt_loss"] > steps[1].metrics["gpt_loss"] > 0
    assert (await learner.start_run(SPEC)).resumed
    info = await learner.get_info()
    assert (info.run_id, info.optimizer_steps) == ("run", 2)
    saved = await learner.save_checkpoint(
        folder=str(tmp_path / "ckpt"), tag="two", trainer_state=b"state"
    )
    assert saved.size_bytes > 0
    expected = await learner.train(step_of(2), [make_samples(5)])
    loaded = await learner.load_checkpoint(folder=str(tmp_path / "ckpt"))
    assert (loaded.tag, loaded.optimizer_steps, loaded.trainer_state) == ("two", 2, b"state")
    again = await learner.train(step_of(2, request_id="replay"), [make_samples(5)])
    assert (again.metrics, again.grad_norm) == (expected.metrics, expected.grad_norm)
    exported = await learner.export_model(folder=str(tmp_path / "model"))
    assert (Path(exported.path) / "config.json").is_file()


async def test_a_step_is_taken_once_however_often_it_is_sent(learner):
    await learner.start_run(SPEC)
    trained = metrics.TRAINED_TOKENS._value.get()
    together = await asyncio.gather(
        *(learner.train(step_of(0), [make_samples()]) for _ in range(3))
    )
    late = await learner.train(step_of(0), [make_samples()])
    assert {r.grad_norm for r in (*together, late)} == {late.grad_norm}
    assert (await learner.get_info()).optimizer_steps == 1
    assert metrics.TRAINED_TOKENS._value.get() - trained == late.num_action_tokens


async def test_a_step_goes_on_when_its_caller_has_gone(learner):
    await learner.start_run(SPEC)
    call = asyncio.ensure_future(learner.train(step_of(0), [make_samples()]))
    await asyncio.sleep(0.01)
    call.cancel()
    result = await learner.train(step_of(0), [make_samples()])
    assert result.optimizer_steps == 1
    assert (await learner.train(step_of(1), [make_samples()])).optimizer_steps == 2


async def test_steps_out_of_order_and_strange_runs(learner):
    await learner.start_run(SPEC)
    with pytest.raises(StateError) as caught:
        await learner.train(step_of(3), [make_samples()])
    assert caught.value.info.reason == "WRONG_STEP"
    with pytest.raises(StateError) as caught:
        await learner.train(step_of(0, run_id="other"), [make_samples()])
    assert caught.value.info.reason == "WRONG_RUN"
    assert f"another run, {SPEC.run_id}, began on this learner at 20" in str(caught.value)
    assert "--ckpt.load_enable" in str(caught.value)


async def test_wrong_requests_are_named_and_do_no_harm(learner):
    await learner.start_run(SPEC)
    samples = make_samples()
    with pytest.raises(RequestError, match="head value"):
        await learner.train(step_of(0, ValueLoss()), [samples])
    with pytest.raises(RequestError, match="needs advantages"):
        await learner.train(step_of(0, PolicyLoss()), [samples])
    with pytest.raises(RequestError) as caught:
        await learner.train(replace(step_of(0), max_tokens_per_micro_batch=10), [samples])
    assert caught.value.info.sample_id == "s3"
    numbers = np.zeros(samples.sequences.num_tokens, np.float32)
    bad = numbers.copy()
    bad[7] = np.nan
    with pytest.raises(RequestError) as caught:
        await learner.train(
            step_of(0, PolicyLoss()), [replace(samples, advantages=bad, old_logprobs=numbers)]
        )
    assert caught.value.info.sample_id == "s1"
    with pytest.raises(RequestError, match="vocabulary"):
        await learner.forward([SequenceBatch.of([[1, 99999]])])
    with pytest.raises(RequestError, match="logprobs"):
        await learner.forward([SequenceBatch.of([[1, 2]])], output=ForwardOutput.VALUES)
    assert (await learner.train(step_of(0), [samples])).applied


async def test_a_refused_gradient_says_so_over_the_wire(learner):
    await learner.start_run(SPEC)
    samples = make_samples()
    numbers = np.full(samples.sequences.num_tokens, -5, np.float32)
    huge = replace(samples, advantages=np.full_like(numbers, 3e38), old_logprobs=numbers)
    result = await learner.train(step_of(0, PolicyLoss()), [huge])
    assert not result.applied
    assert result.optimizer_steps == 0
    assert (await learner.train(step_of(0, request_id="next"), [samples])).applied


async def test_forward_in_chunks_is_as_one_by_one(learner):
    await learner.start_run(SPEC)
    chunks = [replace(make_samples(n).sequences, sample_ids=()) for n in range(3)]
    together = await learner.forward(chunks, temperature=0.7, with_entropy=True)
    for chunk, result in zip(chunks, together, strict=True):
        (alone,) = await learner.forward([chunk], temperature=0.7, with_entropy=True)
        np.testing.assert_allclose(result.output, alone.output, atol=2e-5)
        np.testing.assert_allclose(result.entropy, alone.entropy, atol=2e-5)
    repeat = await learner.forward(chunks, temperature=0.7, with_entropy=True)
    assert all((a.output == b.output).all() for a, b in zip(together, repeat, strict=True))


async def test_info_is_answered_while_a_step_is_under_way(learner):
    await learner.start_run(SPEC)
    long = make_samples(lengths=(200,) * 16)
    call = asyncio.ensure_future(
        learner.train(replace(step_of(0), max_tokens_per_micro_batch=200), [long])
    )
    answered = 0
    while not call.done():
        await learner.get_info()
        answered += not call.done()
    assert (await call).num_micro_batches == 16
    assert answered > 0


async def test_sleep_and_wake(learner):
    await learner.start_run(SPEC)
    await learner.sleep()
    with pytest.raises(StateError, match="asleep"):
        await learner.train(step_of(0), [make_samples()])
    await learner.wake()
    assert (await learner.train(step_of(0, request_id="b"), [make_samples()])).applied


async def test_a_push_to_nobody_names_them(learner):
    await learner.start_run(SPEC)
    with pytest.raises(InfraError, match=r"127\.0\.0\.1:1"):
        await learner.push_weights(policy_version=1, addresses=["127.0.0.1:1"], group_timeout=2.0)
    assert (await learner.get_info()).policy_version == 0


async def test_a_critic_has_nothing_to_push(tiny_model_dir):
    service = LearnerService(
        LearnerSettings(model_name_or_path=str(tiny_model_dir), head=Head.VALUE)
    )
    async with loopback(service) as address, LearnerClient(address) as client:
        await client.start_run(SPEC)
        (result,) = await client.forward([make_samples().sequences])
        assert result.output.shape == (29,)
        with pytest.raises(StateError, match="head value"):
            await client.push_weights(policy_version=1, addresses=["127.0.0.1:1"])

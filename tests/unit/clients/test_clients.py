"""The four clients against the fakes, over real sockets."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quartet import codec, types
from quartet.clients import LearnerClient, RefClient, RewardClient, RolloutClient
from quartet.errors import (
    ConfigError,
    FatalError,
    InfraError,
    RequestError,
    StateError,
    UnavailableError,
)
from quartet.rpc import policy
from quartet.testing import fakes
from quartet.testing.fakes import FakeLearner, FakeRef, FakeReward, FakeRollout
from quartet.testing.loopback import loopback
from quartet.types import SequenceBatch, TrainSamples

SPEC = types.RunSpec(
    run_id="run", optimizer=types.OptimizerConfig(), schedule=types.ScheduleConfig()
)


@pytest.fixture
def rollout() -> FakeRollout:
    return FakeRollout()


@pytest.fixture
async def rollouts(rollout: FakeRollout) -> AsyncIterator[RolloutClient]:
    async with loopback(rollout) as address, RolloutClient(address) as client:
        yield client


@pytest.fixture
def learner() -> FakeLearner:
    return FakeLearner()


@pytest.fixture
async def learners(learner: FakeLearner) -> AsyncIterator[LearnerClient]:
    async with loopback(learner) as address, LearnerClient(address) as client:
        yield client


def group(name: str = "g", **fields: Any) -> types.PromptGroup:
    return types.PromptGroup(group_id=name, prompt_token_ids=(3, 4, 5), **fields)


async def generate(
    client: RolloutClient, *groups: types.PromptGroup, request_id: str = "r", **options: Any
) -> types.GenerateResult:
    sampling = options.pop("sampling", types.SamplingParams(max_new_tokens=8, ignore_eos=True))
    return await client.generate(
        request_id=request_id, groups=groups or [group()], sampling=sampling, **options
    )


async def test_generate(rollouts: RolloutClient, rollout: FakeRollout) -> None:
    asked = [group("a", num_samples=2, seeds=(1, 2), sample_ids=("a0", "a1")), group("b")]
    result = await generate(rollouts, *asked)
    assert [g.group_id for g in result.groups] == ["a", "b"]
    first, second = result.groups[0].completions
    assert (first.sample_id, second.sample_id) == ("a0", "a1")
    assert first.token_ids.tolist() != second.token_ids.tolist()
    assert first.versions == (types.VersionSpan(policy_version=0, start=0, end=8),)
    assert first.finish_reason is types.FinishReason.LENGTH
    request = rollout.script.calls[0].request
    assert request.groups == tuple(asked)


async def test_same_seed_same_tokens(rollouts: RolloutClient) -> None:
    first = await generate(rollouts, group(seeds=(7,)), request_id="1")
    again = await generate(rollouts, group(seeds=(7,)), request_id="2")
    tokens = [r.groups[0].completions[0].token_ids.tolist() for r in (first, again)]
    assert tokens[0] == tokens[1]


async def test_limits_of_sampling(rollouts: RolloutClient) -> None:
    seeds = tuple(range(50))
    sampling = types.SamplingParams(max_new_tokens=6, min_new_tokens=3, stop_token_ids=(7, 8, 9))
    result = await generate(rollouts, group(num_samples=50, seeds=seeds), sampling=sampling)
    for completion in result.groups[0].completions:
        tokens = completion.token_ids.tolist()
        stopped = completion.finish_reason is types.FinishReason.STOP
        assert 3 <= len(tokens) - stopped <= 6
        assert stopped == (tokens[-1] in (fakes.EOS, 7, 8, 9))
        assert not {fakes.EOS, 7, 8, 9} & set(tokens[:-1])
        assert stopped or len(tokens) == 6


async def test_version_that_is_too_old(rollouts: RolloutClient) -> None:
    with pytest.raises(StateError) as caught:
        await generate(rollouts, min_policy_version=1)
    assert caught.value.info.field == "min_policy_version"


async def test_failed_sample_beside_a_good_one(
    rollouts: RolloutClient, rollout: FakeRollout
) -> None:
    failure = types.Failure(error_class="DATA", reason="TOO_LONG", message="too long")
    rollout.fail_sample("x", failure)
    result = await generate(rollouts, group(num_samples=2, sample_ids=("x", "y")))
    bad, good = result.groups[0].completions
    assert bad.failure == failure
    assert good.failure is None
    assert len(good.token_ids) == 8


async def test_sleep_wake_pause_resume(rollouts: RolloutClient) -> None:
    assert await rollouts.sleep(level=1) is types.ReplicaState.ASLEEP
    with pytest.raises(StateError):
        await generate(rollouts)
    assert await rollouts.wake(tags=["weights"]) is types.ReplicaState.ASLEEP
    assert await rollouts.wake() is types.ReplicaState.SERVING
    assert await rollouts.sleep(level=2) is types.ReplicaState.ASLEEP
    assert await rollouts.wake() is types.ReplicaState.STALE
    assert await rollouts.pause(types.PauseMode.KEEP) == 0
    assert await rollouts.resume() == 0
    with pytest.raises(RequestError, match="level is 3"):
        await rollouts.sleep(level=3)


async def test_receive_weights_is_a_stream(rollouts: RolloutClient) -> None:
    request = types.ReceiveWeightsRequest(epoch=1, policy_version=1)
    events = [event.event async for event in rollouts.receive_weights(request)]
    assert events == ["ready", "done"]


async def test_broken_stream_raises_at_once(rollouts: RolloutClient, rollout: FakeRollout) -> None:
    rollout.script.fail("ReceiveWeights", InfraError("gone"))
    request = types.ReceiveWeightsRequest(epoch=1, policy_version=1)
    with pytest.raises(InfraError, match="gone"):
        await anext(rollouts.receive_weights(request))


async def test_closing_a_stream_cancels_the_call(
    rollouts: RolloutClient, rollout: FakeRollout
) -> None:
    rollout.script.hold("ReceiveWeights")
    request = types.ReceiveWeightsRequest(epoch=1, policy_version=1)
    events = rollouts.receive_weights(request)
    reading = asyncio.ensure_future(anext(events))
    await rollout.script.until(lambda: rollout.script.count("ReceiveWeights") == 1)
    reading.cancel()
    await rollout.script.until(lambda: rollout.script.cancelled == ["ReceiveWeights"])
    assert rollouts.in_flight == 0


async def test_push_through_the_real_methods(
    rollouts: RolloutClient, learners: LearnerClient, rollout: FakeRollout
) -> None:
    await learners.start_run(SPEC)
    await learners.train(step(0), [samples([[1, 2]])])
    result = await learners.push_weights(
        policy_version=5, addresses=[rollouts.address, "127.0.0.1:1"]
    )
    assert [r.committed for r in result.replicas] == [True, False]
    assert result.replicas[1].failed_phase == "prepare"
    assert "127.0.0.1:1" in result.replicas[1].error
    info = await rollouts.get_info(include_manifest=True)
    assert (info.policy_version, rollout.weights) == (5, 1)
    assert info.manifest is not None
    assert (await rollouts.get_info()).manifest is None
    tokens = (await generate(rollouts)).groups[0].completions[0]
    whole = SequenceBatch.of([[3, 4, 5, *tokens.token_ids.tolist()]])
    (forward,) = await learners.forward([whole])
    assert np.array_equal(forward.output[3:], tokens.logprobs)


async def test_a_lost_prepare_does_not_fail_a_push(
    rollouts: RolloutClient, learners: LearnerClient, rollout: FakeRollout
) -> None:
    rollout.script.fail("PrepareWeights", UnavailableError("tcp handshaker shutdown"), times=1)
    result = await learners.push_weights(policy_version=5, addresses=[rollouts.address])
    assert [r.committed for r in result.replicas] == [True]
    assert rollout.script.count("PrepareWeights") == 2


def samples(rows: list[list[int]], **arrays: Any) -> TrainSamples:
    return TrainSamples(sequences=SequenceBatch.of(rows), **arrays)


def step(expected: int, loss: types.Loss | None = None, request_id: str = "") -> types.TrainStep:
    return types.TrainStep(
        request_id=request_id or f"step-{expected}",
        run_id="run",
        loss=loss or types.PolicyLoss(),
        expected_optimizer_steps=expected,
    )


async def test_run_train_checkpoint_export(
    learners: LearnerClient, learner: FakeLearner, tmp_path: Path
) -> None:
    with pytest.raises(StateError, match="no run"):
        await learners.train(step(0), [samples([[1]])])
    assert not (await learners.start_run(SPEC)).resumed
    assert (await learners.start_run(SPEC)).resumed
    result = await learners.train(step(0), [samples([[1, 2]]), samples([[3]])])
    assert (result.optimizer_steps, result.num_samples, result.num_tokens) == (1, 2, 3)
    assert list(result.metrics) == sorted(result.metrics)
    saved = await learners.save_checkpoint(folder=str(tmp_path), tag="t", trainer_state=b"\x00x")
    assert saved.path == f"{tmp_path}/t"
    await learners.train(step(1), [samples([[1]])])
    loaded = await learners.load_checkpoint(folder=str(tmp_path))
    assert (loaded.tag, loaded.optimizer_steps, loaded.trainer_state) == ("t", 1, b"\x00x")
    exported = await learners.export_model(folder=str(tmp_path / "m"), config_values={"mean": 0.5})
    assert (tmp_path / "m" / "config.json").stat().st_size == exported.size_bytes
    info = await learners.get_info()
    assert (info.run_id, info.optimizer_steps, info.head) == ("run", 1, types.Head.LM)
    await learners.sleep()
    await learners.wake()
    assert len(learner.trained) == 2


async def test_a_repeated_train_never_steps_twice(
    learners: LearnerClient, learner: FakeLearner
) -> None:
    await learners.start_run(SPEC)
    answers = [await learners.train(step(0), [samples([[1]])]) for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]
    assert learner.optimizer_steps == 1
    with pytest.raises(StateError, match="stands at step 1") as caught:
        await learners.train(step(0, request_id="other"), [samples([[1]])])
    assert caught.value.info.reason == "WRONG_STEP"


async def test_large_batches_travel_in_chunks_and_come_back_whole(
    learners: LearnerClient, learner: FakeLearner
) -> None:
    await learners.start_run(SPEC)
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 64, n).tolist() for n in rng.integers(1, 40_000, 20)]
    batch = SequenceBatch.of(rows, [f"s{i}" for i in range(20)])
    advantages = rng.standard_normal(batch.num_tokens).astype(np.float32)
    sent = TrainSamples(sequences=batch, advantages=advantages, action_mask=advantages > 0)
    result = await learners.train(step(0), [sent])
    _, parts = learner.trained[0]
    assert len(parts) > 3
    assert all(9 * part.sequences.num_tokens <= policy.CHUNK_BYTES for part in parts)
    tokens = np.concatenate([part.sequences.token_ids for part in parts])
    back = np.concatenate([part.advantages for part in parts if part.advantages is not None])
    assert np.array_equal(tokens, batch.token_ids)
    assert np.array_equal(back, advantages)
    assert sum((part.sequences.sample_ids for part in parts), ()) == batch.sample_ids
    assert result.num_action_tokens == np.count_nonzero(advantages > 0)
    small = SequenceBatch.of([[1, 2]])
    first, second = await learners.forward([batch, small], with_entropy=True)
    assert np.array_equal(first.output, fakes.logprobs(batch, 1))
    assert np.array_equal(second.output, fakes.logprobs(small, 1))
    assert first.entropy is not None
    assert np.array_equal(first.entropy, fakes.entropies(batch))


@pytest.mark.parametrize("loss", [types.PairwiseLoss(), types.DpoLoss()])
async def test_pairs_stay_together(
    learners: LearnerClient, learner: FakeLearner, loss: types.Loss
) -> None:
    await learners.start_run(SPEC)
    long = policy.CHUNK_BYTES // 4 - 10
    margins = np.array([0.5, 1.5], np.float32)
    sent = samples([[1] * long, [2], [3], [4] * long], margins=margins)
    await learners.train(step(0, loss), [sent])
    _, parts = learner.trained[0]
    assert [part.sequences.lengths.tolist() for part in parts] == [[long, 1], [1, long]]
    assert [part.margins.tolist() for part in parts if part.margins is not None] == [[0.5], [1.5]]


@pytest.mark.parametrize(
    ("head", "expected"), [(types.Head.VALUE, fakes.values), (types.Head.REWARD, fakes.rewards)]
)
async def test_forward_of_the_other_heads(head: types.Head, expected: Any) -> None:
    batch = SequenceBatch.of([[5, 6, 7], [8]])
    async with loopback(FakeLearner(head)) as address, LearnerClient(address) as client:
        await client.start_run(SPEC)
        (result,) = await client.forward([batch])
        assert np.array_equal(result.output, expected(batch, 0))
        with pytest.raises(RequestError, match=f"a {head} head gives no logprobs"):
            await client.forward([batch], output=types.ForwardOutput.LOGPROBS)


async def test_ref_agrees_with_the_untrained_policy(learners: LearnerClient) -> None:
    await learners.start_run(SPEC)
    batches = [SequenceBatch.of([[1, 2, 3], [4]]), SequenceBatch.of([[5, 6]])]
    async with loopback(FakeRef()) as address, RefClient(address) as ref:
        flat = await ref.compute_logprobs(batches, temperature=0.7)
        assert await ref.compute_logprobs([]) == []
        await ref.sleep()
        await ref.wake()
        assert (await ref.get_info()).info.service == "ref"
    policy_side = await learners.forward(batches, temperature=0.7)
    for ours, theirs in zip(flat, policy_side, strict=True):
        assert np.array_equal(ours, theirs.output)


async def test_small_chunks_travel_together_and_come_back_apart() -> None:
    batches = [SequenceBatch.of([[i, i + 1], [i]], [f"{i}a", f"{i}b"]) for i in range(10)]
    batches.insert(3, SequenceBatch.of([]))
    ref, learner = FakeRef(), FakeLearner(types.Head.REWARD)
    async with loopback(ref) as address, RefClient(address) as client:
        flat = await client.compute_logprobs(batches)
    async with loopback(learner) as address, LearnerClient(address) as client:
        await client.start_run(SPEC)
        results = await client.forward(batches)
        assert [len(r.output) for r in await client.forward(batches[3:4])] == [0]
        assert await client.forward([]) == []
    (message,) = [c.request for c in ref.script.calls if c.method == "ComputeLogprobs"]
    assert message.sequences.sample_ids[:3] == ("0a", "0b", "1a")
    for batch, logprobs, result in zip(batches, flat, results, strict=True):
        assert np.array_equal(logprobs, fakes.logprobs(batch, 0))
        assert np.array_equal(result.output, fakes.rewards(batch, 0))


async def test_score_with_a_failure_in_its_place() -> None:
    fake = FakeReward()
    failure = types.Failure(error_class="DATA", reason="X", message="no", replica="here")
    fake.fail_sample("b", failure)
    items = [types.ScoreItem(sample_id=name, prompt="p", query="see") for name in ("a", "b")]
    async with loopback(fake) as address, RewardClient(address) as client:
        batch = await client.score(request_id="r", items=items, tokenizer_fingerprint="f")
        await client.sleep()
        await client.wake()
    assert batch.results[0].outcome == types.Reward(reward=2 / 3, score=2 / 3)
    assert batch.results[1].outcome == failure
    assert fake.script.calls[0].request.tokenizer_fingerprint == "f"


async def test_answer_against_the_contract_is_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeReward()
    real = codec.encode_score_batch

    def without_results(batch: types.ScoreBatch) -> Any:
        return real(types.ScoreBatch(results=()))

    monkeypatch.setattr(codec, "encode_score_batch", without_results)
    item = types.ScoreItem(sample_id="a", prompt="", query="")
    async with loopback(fake) as address, RewardClient(address) as client:
        with pytest.raises(FatalError, match="does not keep to the contract") as caught:
            await client.score(request_id="r", items=[item])
    assert caught.value.info.replica == address


async def test_chunks_out_of_order_are_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    real = codec.encode_compute_logprobs_response
    monkeypatch.setattr(
        codec, "encode_compute_logprobs_response", lambda chunk_id, flat: real("7", flat)
    )
    async with loopback(FakeRef()) as address, RefClient(address) as client:
        with pytest.raises(FatalError, match="chunk '7' came back in the place of 0"):
            await client.compute_logprobs([SequenceBatch.of([[1]])])


async def test_nan_reward_of_a_server_names_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    from quartet.codec import reward as reward_codec
    from quartet.errors import DataError

    fake = FakeReward(scorer=lambda item: math.nan)
    item = types.ScoreItem(sample_id="a", prompt="", query="")
    async with loopback(fake) as address, RewardClient(address) as client:
        with pytest.raises(DataError) as refused:
            await client.score(request_id="1", items=[item])
        monkeypatch.setattr(reward_codec, "_check_finite", skip_in_server(reward_codec))
        with pytest.raises(DataError) as received:
            await client.score(request_id="2", items=[item])
    assert refused.value.info.sample_id == received.value.info.sample_id == "a"
    assert received.value.info.reason == "NOT_FINITE"


def skip_in_server(module: Any) -> Any:
    """The check as it is, but blind while encoding: a server of another make."""
    real, passed = module._check_finite, [0]

    def check(reward: types.Reward, sample_id: str) -> None:
        passed[0] += 1
        if passed[0] > 2:  # encode_score_result and encode_reward check once each
            real(reward, sample_id)

    return check


async def test_wait_ready_names_address_and_time() -> None:
    async with RewardClient("127.0.0.1:1") as client:
        with pytest.raises(UnavailableError) as caught:
            await client.wait_ready(0.3)
    assert re.match(r"no reward service at 127\.0\.0\.1:1 after \d+\.\d s: ", str(caught.value))
    assert caught.value.info.field == "reward.address"


async def test_wait_ready_at_a_service_of_another_kind(rollouts: RolloutClient) -> None:
    async with RewardClient(rollouts.address) as client:
        with pytest.raises(ConfigError, match="is no reward service"):
            await client.wait_ready(5)


async def test_wait_ready_waits_for_a_server_that_comes_later() -> None:
    async with loopback(FakeReward()) as address:
        pass  # The port is free again, and nobody is there.
    port = int(address.rpartition(":")[2])
    from quartet.config.rpc import RpcConfig

    async with RewardClient(address) as client:
        waiting = asyncio.ensure_future(client.wait_ready(10))
        await asyncio.sleep(0.1)
        async with loopback(FakeReward(), RpcConfig(port=port, drain_seconds=0)):
            await waiting


async def test_calls_in_flight_are_bounded(rollout: FakeRollout) -> None:
    gate = rollout.script.hold("Generate")
    async with loopback(rollout) as address, RolloutClient(address, max_in_flight=2) as client:
        calls = [asyncio.ensure_future(generate(client, request_id=f"{i}")) for i in range(5)]
        await rollout.script.until(lambda: rollout.script.count("Generate") == 2)
        await client.get_info()  # A control method does not wait.
        assert (client.in_flight, rollout.script.count("Generate")) == (2, 2)
        gate.set()
        await asyncio.gather(*calls)
    assert rollout.script.count("Generate") == 5


async def test_closed_client() -> None:
    async with loopback(FakeReward()) as address:
        client = RewardClient(address)
        await client.get_info()
        await client.close()
        with pytest.raises(UnavailableError, match="closed"):
            await client.get_info()

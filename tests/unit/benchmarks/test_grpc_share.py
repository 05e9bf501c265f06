"""The parts of the benchmark of gRPC's share: what is recorded can be made again."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.methods import CLIENTS, METHODS
from benchmarks.processes import cpu_seconds, process_tree
from benchmarks.recording import Call, Recorder, RecordingChannel, calls_of_steps, read_calls
from benchmarks.replay import replay
from quartet.clients import LearnerClient, RefClient, RewardClient, base
from quartet.rpc import policy
from quartet.testing.fakes import FakeLearner, FakeRef, FakeReward
from quartet.testing.loopback import loopback
from quartet.types import (
    OptimizerConfig,
    RunSpec,
    ScheduleConfig,
    ScoreItem,
    SequenceBatch,
    SftLoss,
    TrainSamples,
    TrainStep,
)

SPEC = RunSpec(run_id="run", optimizer=OptimizerConfig(), schedule=ScheduleConfig(total_steps=9))


@pytest.fixture
def recording(tmp_path, monkeypatch):
    """A folder that the calls of all clients made in the test are recorded to."""
    recorder = Recorder(tmp_path / "test.calls")
    create = base.create_channel

    def recorded(*args, **kwargs):
        return RecordingChannel(create(*args, **kwargs), recorder)

    monkeypatch.setattr(base, "create_channel", recorded)
    return tmp_path


async def make_calls():
    items = [ScoreItem(sample_id=name, prompt="p", query="see") for name in ("a", "b")]
    batch = SequenceBatch.of([[1, 2, 3], [4, 5]], ["a", "b"])
    mask = np.array([0, 1, 1, 0, 1], bool)
    step = TrainStep(request_id="t", run_id="run", expected_optimizer_steps=0, loss=SftLoss())
    async with (
        loopback(FakeReward()) as reward_at,
        loopback(FakeRef()) as ref_at,
        loopback(FakeLearner()) as learner_at,
        RewardClient(reward_at) as reward,
        RefClient(ref_at) as ref,
        LearnerClient(learner_at) as learner,
    ):
        await reward.score(request_id="r", items=items)
        await reward.score(request_id="q", items=items[:1])
        await ref.compute_logprobs([batch])
        await learner.start_run(SPEC)
        await learner.train(step, [TrainSamples(sequences=batch, action_mask=mask)])


def name_of(call):
    return call.method.rsplit("/", 1)[1]


async def test_messages_of_each_call_are_kept_in_order(recording):
    await make_calls()
    calls = read_calls(recording)
    assert list(map(name_of, calls)) == ["Score", "Score", "ComputeLogprobs", "StartRun", "Train"]
    train = calls[-1]
    assert [len(train.requests), len(train.responses)] == [2, 1]
    assert train.began <= train.ended
    assert train.num_bytes == sum(map(len, train.requests + train.responses))
    # What a killed process left half-written is not read.
    path = recording / "test.calls"
    path.write_bytes(path.read_bytes()[:-1])
    assert read_calls(recording)[-1].responses == []


def test_recorded_calls_are_made_again(recording, monkeypatch):
    asyncio.run(make_calls())
    monkeypatch.undo()
    monkeypatch.setattr("benchmarks.replay.ENOUGH_SECONDS", 0.01)
    calls = [call for call in read_calls(recording) if name_of(call) != "StartRun"]
    costs = {cost.method.label: cost for cost in replay(calls)}
    assert list(costs) == ["reward.Score", "ref.ComputeLogprobs", "learner.Train"]
    assert costs["reward.Score"].num_calls == 2
    assert costs["learner.Train"].num_bytes == calls[-1].num_bytes
    assert all(cost.cpu_seconds >= 0 for cost in costs.values())


def test_what_cannot_be_made_again_is_named(recording):
    asyncio.run(make_calls())
    calls = read_calls(recording)
    with pytest.raises(RuntimeError, match=r"no row for .*StartRun"):
        replay(calls)
    calls[0].responses.clear()
    with pytest.raises(RuntimeError, match="Score has no answer"):
        replay(calls[:3])


def test_steps_end_with_the_answers_of_their_pushes():
    push = "/quartet.api.learner.v1.LearnerService/PushWeights"
    calls = [
        Call(method=name, began=began, ended=ended)
        for name, began, ended in [
            (push, 0, 2),
            ("a", 3, 4),
            (push, 5, 8),
            ("commit", 6, 7),
            ("b", 9, 10),
            (push, 11, 12),
            ("c", 13, 14),
        ]
    ]
    assert [c.method for c in calls_of_steps(calls, 1, 1)] == ["a", push, "commit"]
    assert [c.method for c in calls_of_steps(calls, 2, 2)] == ["b", push]
    assert len(calls_of_steps(calls, 1, 2)) == 5
    with pytest.raises(RuntimeError, match="no end of step 3"):
        calls_of_steps(calls, 2, 3)


def test_every_row_is_a_method_of_the_contract():
    known = policy.services()
    for method in METHODS:
        assert method.name in known[method.client.service]
        for kind in ("Request", "Response"):
            assert hasattr(CLIENTS[method.client], method.name + kind)


def test_cpu_time_of_processes():
    code = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\ninput()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        child.stdout.readline()
        assert 0.18 <= cpu_seconds(child.pid) < 1
        assert child.pid in process_tree(os.getpid())
    finally:
        child.communicate(b"\n")

"""Bytes that are no message: the caller's fault, by every method of every room."""

from __future__ import annotations

import logging
from typing import Any

import grpc
import pytest

from quartet.api.learner.v1 import learner_service_pb2
from quartet.api.ref.v1 import ref_service_pb2
from quartet.api.reward.v1 import reward_service_pb2
from quartet.api.rollout.v1 import rollout_service_pb2
from quartet.errors import RequestError
from quartet.rpc.errors import from_rpc_error
from quartet.testing.fakes import FakeLearner, FakeRef, FakeReward, FakeRollout
from quartet.testing.loopback import loopback
from quartet.types import OptimizerConfig, RunSpec, ScheduleConfig


def learner_in_a_run() -> FakeLearner:
    learner = FakeLearner()
    learner.spec = RunSpec(run_id="r", optimizer=OptimizerConfig(), schedule=ScheduleConfig())
    return learner


ROOMS = {
    "RolloutService": (FakeRollout, rollout_service_pb2.DESCRIPTOR),
    "RewardService": (FakeReward, reward_service_pb2.DESCRIPTOR),
    "RefService": (FakeRef, ref_service_pb2.DESCRIPTOR),
    "LearnerService": (learner_in_a_run, learner_service_pb2.DESCRIPTOR),
}
# A tag cut off, and lengths beyond the end of the message.
GARBAGE = (b"\xff\xff", b"\x0a\x7f", b"\x12\xff\xff\xff\xff\x7f")


@pytest.mark.parametrize("name", ROOMS)
async def test_every_method_refuses_garbage(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, file = ROOMS[name]
    service: Any = file.services_by_name[name]
    fake: Any = make()
    with caplog.at_level(logging.WARNING):
        async with loopback(fake) as address, grpc.aio.insecure_channel(address) as channel:
            for method in service.methods:
                for garbage in GARBAGE:
                    # On the wire a call of one message is a stream of one.
                    call = channel.stream_stream(f"/{service.full_name}/{method.name}")
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        _ = [answer async for answer in call(iter([garbage]), timeout=10)]
                    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, method.name
                    error = from_rpc_error(caught.value)
                    assert isinstance(error, RequestError)
                    assert error.info.reason == "UNREADABLE_MESSAGE"
                    assert error.info.replica == fake.replica
    assert service.methods
    assert not caplog.records

"""A server in this process: health, errors, room, metrics, retries."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from quartet.clients import RewardClient, RolloutClient
from quartet.config.rpc import RpcConfig
from quartet.errors import (
    ConfigError,
    DataError,
    DeadlineError,
    FatalError,
    RequestError,
    UnavailableError,
)
from quartet.obs import metrics
from quartet.rpc import policy, probe
from quartet.rpc.channel import create_channel
from quartet.rpc.server import Server
from quartet.testing.fakes import FakeReward, FakeRollout
from quartet.testing.loopback import loopback
from quartet.types import PromptGroup, SamplingParams, ScoreItem

SERVICE = "quartet.api.reward.v1.RewardService"
ITEM = ScoreItem(sample_id="s", prompt="", query="eel")


async def score(client: RewardClient, request_id: str = "r", timeout: float = 10) -> float:
    batch = await client.score(request_id=request_id, items=[ITEM], timeout=timeout)
    outcome: Any = batch.results[0].outcome
    return outcome.reward


@pytest.fixture
async def fake() -> FakeReward:
    return FakeReward()


@pytest.fixture
async def client(fake: FakeReward) -> AsyncIterator[RewardClient]:
    async with loopback(fake) as address, RewardClient(address) as client:
        yield client


async def test_answers(client: RewardClient) -> None:
    assert await score(client) == pytest.approx(2 / 3)


async def test_uncaught_exception_is_fatal_and_logged_with_its_traceback(
    fake: FakeReward, client: RewardClient, caplog: pytest.LogCaptureFixture
) -> None:
    fake.script.fail("Score", ZeroDivisionError("oh"))
    with caplog.at_level(logging.ERROR), pytest.raises(FatalError, match="ZeroDivisionError: oh"):
        await score(client)
    record = next(r for r in caplog.records if r.name == "quartet.rpc.interceptors")
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


async def test_error_names_the_server(fake: FakeReward, client: RewardClient) -> None:
    fake.script.fail("Score", DataError("bad", reason="X", sample_id="s"))
    with pytest.raises(DataError) as caught:
        await score(client)
    assert caught.value.info.sample_id == "s"
    assert caught.value.info.replica == fake.replica


async def test_method_the_server_does_not_have() -> None:
    async with loopback(FakeReward()) as address, RolloutClient(address) as client:
        with pytest.raises(RequestError) as caught:
            await client.get_info()
    assert caught.value.info.reason == "UNIMPLEMENTED"


async def test_deadline(fake: FakeReward, client: RewardClient) -> None:
    fake.script.hold("Score")
    with pytest.raises(DeadlineError):
        await score(client, timeout=0.1)


async def test_cancelling_the_call_cancels_the_work() -> None:
    fake = FakeRollout()
    fake.script.hold("Generate")
    group = PromptGroup(group_id="g", prompt_token_ids=(1,))
    async with loopback(fake) as address, RolloutClient(address) as client:
        call = asyncio.ensure_future(
            client.generate(request_id="r", groups=[group], sampling=SamplingParams())
        )
        await fake.script.until(lambda: fake.script.count("Generate") == 1)
        call.cancel()
        await fake.script.until(lambda: fake.script.cancelled == ["Generate"])
        assert call.cancelled()


async def test_one_call_too_many_is_refused_but_control_gets_in() -> None:
    fake = FakeReward()
    gate = fake.script.hold("Score")
    rpc = RpcConfig(max_concurrent_calls=2, drain_seconds=0)
    async with loopback(fake, rpc) as address, RewardClient(address) as client:
        held = [asyncio.ensure_future(score(client, f"{i}")) for i in range(2)]
        await fake.script.until(lambda: fake.script.count("Score") == 2)
        with pytest.raises(UnavailableError) as caught:
            await score(client, "third")
        assert caught.value.info.reason == "TOO_MANY_CALLS"
        assert caught.value.info.retry_after
        assert (await client.get_info()).info.service == "reward"
        await client.sleep()
        gate.set()
        await asyncio.gather(*held)
        assert await score(client, "fourth") > 0


def sample(name: str, method: str, **labels: str) -> float:
    labels = {"service": SERVICE, "method": method, **labels}
    return metrics.REGISTRY.get_sample_value(name, labels) or 0.0


async def test_calls_are_counted_by_method_and_code(fake: FakeReward, client: RewardClient) -> None:
    duration = "quartet_rpc_call_duration_seconds_count"
    started = "quartet_rpc_started_calls_total"
    ok, bad = sample(duration, "Score", code="OK"), sample(duration, "Score", code="INTERNAL")
    before = sample(started, "Score")
    await score(client, "1")
    fake.script.fail("Score", FatalError("x"))
    with pytest.raises(FatalError):
        await score(client, "2")
    assert sample(duration, "Score", code="OK") == ok + 1
    assert sample(duration, "Score", code="INTERNAL") == bad + 1
    assert sample(started, "Score") == before + 2


async def test_calls_in_flight_are_shown(fake: FakeReward, client: RewardClient) -> None:
    gate = fake.script.hold("Score")
    call = asyncio.ensure_future(score(client))
    await fake.script.until(lambda: fake.script.count("Score") == 1)
    assert sample("quartet_rpc_in_flight_calls", "Score") == 1
    gate.set()
    await call
    assert sample("quartet_rpc_in_flight_calls", "Score") == 0


async def test_unavailable_is_tried_again_for_an_idempotent_method(
    fake: FakeReward, client: RewardClient
) -> None:
    fake.script.fail("Score", UnavailableError("x"), times=2)
    assert await score(client) > 0
    assert fake.script.count("Score") == 3


@pytest.mark.parametrize("error", [FatalError("x"), RequestError("x"), DataError("x")])
async def test_other_failures_are_not_tried_again(
    fake: FakeReward, client: RewardClient, error: Exception
) -> None:
    fake.script.fail("Score", error)
    with pytest.raises(type(error)):
        await score(client)
    assert fake.script.count("Score") == 1


async def test_methods_that_are_not_idempotent_are_not_tried_again() -> None:
    fake = FakeRollout()
    fake.script.fail("CommitWeights", UnavailableError("x"))
    async with loopback(fake) as address, RolloutClient(address) as client:
        with pytest.raises(UnavailableError):
            await client.commit_weights(commit_request())
    assert fake.script.count("CommitWeights") == 1


def commit_request() -> Any:
    from quartet.types import CommitWeightsRequest

    return CommitWeightsRequest(epoch=1, policy_version=1, digest="0")


async def test_a_repeat_is_not_scored_twice(client: RewardClient, fake: FakeReward) -> None:
    scored = []
    fake._scorer = lambda item: float(len(scored.append(item) or scored))  # type: ignore[func-returns-value]
    assert [await score(client, "same") for _ in range(3)] == [1, 1, 1]
    assert await score(client, "other") == 2


async def test_another_request_under_a_used_id_is_refused(
    client: RewardClient, fake: FakeReward
) -> None:
    await score(client)
    other = ScoreItem(sample_id="s", prompt="", query="another text")
    with pytest.raises(RequestError) as caught:
        await client.score(request_id="r", items=[other])
    assert caught.value.info.reason == "REQUEST_ID_REUSED"
    assert await score(client) == pytest.approx(2 / 3)


async def test_messages_above_the_limit_are_the_callers_fault(client: RewardClient) -> None:
    item = ScoreItem(sample_id="s", prompt="", query="x" * (policy.MAX_MESSAGE_BYTES + 1))
    with pytest.raises(RequestError) as caught:
        await client.score(request_id="r", items=[item])
    assert caught.value.info.reason == "MESSAGE_TOO_LARGE"


async def test_messages_above_grpcs_own_limit_pass(client: RewardClient) -> None:
    item = ScoreItem(sample_id="s", prompt="", query="e" * (8 << 20))
    batch = await client.score(request_id="r", items=[item])
    assert len(batch.results) == 1


async def test_health_follows_the_server_and_every_watcher_hears_of_it() -> None:
    server = Server(FakeReward(), RpcConfig(drain_seconds=0))
    address = await server.bind()
    async with create_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE):
            assert await probe.health_of(channel, name, 5) == "NOT_SERVING"
        assert await probe.health_of(channel, "other", 5) == "SERVICE_UNKNOWN"
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        first, second = stub.Watch(request), stub.Watch(request)
        for call in (first, second):
            assert (await call.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        first.cancel()
        server.set_serving(True)
        assert (await second.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert await probe.probe(address) == "SERVING"
        # Not by draining: without a call under way that cuts watchers off at once.
        server.set_serving(False)
        assert (await second.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        second.cancel()
        await server.drain()


async def test_drain_lets_calls_under_way_finish_and_refuses_new_ones() -> None:
    fake = FakeReward()
    gate = fake.script.hold("Score")
    server = Server(fake, RpcConfig(drain_seconds=10))
    async with RewardClient(await server.bind(), retry=False) as client:
        server.set_serving(True)
        call = asyncio.ensure_future(score(client))
        await fake.script.until(lambda: fake.script.count("Score") == 1)
        states = client.watch_health()
        assert await anext(states) == "SERVING"
        drained = asyncio.ensure_future(server.drain())
        assert await anext(states) == "NOT_SERVING"
        with pytest.raises(UnavailableError) as caught:
            await client.get_info(timeout=5)
        assert caught.value.info.reason == "DRAINING"
        assert not drained.done()
        gate.set()
        assert await call > 0
        await asyncio.wait_for(drained, 5)


async def test_reflection_names_the_service(client: RewardClient) -> None:
    async with create_channel(client.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
        ]
        answers = [answer async for answer in stub.ServerReflectionInfo(iter(asked))]
    names = {service.name for service in answers[0].list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names
    raw = answers[1].file_descriptor_response.file_descriptor_proto[0]
    assert FileDescriptorProto.FromString(raw).package == "quartet.api.reward.v1"


async def test_unix_socket(tmp_path: Path) -> None:
    rpc = RpcConfig(host=f"unix:{tmp_path}/s", drain_seconds=0)
    async with loopback(FakeReward(), rpc) as address, RewardClient(address) as client:
        assert address == f"unix:{tmp_path}/s"
        assert await score(client) > 0


async def test_a_taken_port_is_refused_not_shared() -> None:
    async with loopback(FakeReward()) as address:
        port = int(address.rpartition(":")[2])
        with pytest.raises(ConfigError) as caught:
            await Server(FakeReward(), RpcConfig(port=port)).bind()
    assert address in str(caught.value)
    assert caught.value.info.field == "rpc.port"


async def test_request_id_and_room_are_in_the_log(
    fake: FakeReward, client: RewardClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quartet.obs import log

    seen: list[dict[str, Any]] = []
    enter = fake.script.enter

    async def spy(method: str, request: Any) -> None:
        seen.append(log.bound())
        await enter(method, request)

    monkeypatch.setattr(fake.script, "enter", spy)
    await score(client, "my-request")
    assert seen[0]["room"] == "reward"
    assert seen[0]["request_id"] == "my-request"
    assert seen[0]["replica"] == fake.replica


async def test_stream_fails_with_its_error_after_some_answers() -> None:
    from quartet.clients import RefClient
    from quartet.testing.fakes import FakeRef
    from quartet.types import SequenceBatch

    fake = FakeRef()
    fake.script.fail("ComputeLogprobs", DataError("third", sample_id="c"), after=2)
    # So long that each travels in a message of its own.
    chunk = SequenceBatch.of([[1] * (policy.CHUNK_BYTES // 4)])
    async with loopback(fake) as address, RefClient(address) as client:
        with pytest.raises(DataError, match="third"):
            await client.compute_logprobs([chunk] * 5)
    assert fake.script.count("ComputeLogprobs") == 3


async def test_call_without_quartets_headers(fake: FakeReward, client: RewardClient) -> None:
    async with grpc.aio.insecure_channel(client.address) as channel:
        assert await probe.health_of(channel, SERVICE, 5) == "SERVING"

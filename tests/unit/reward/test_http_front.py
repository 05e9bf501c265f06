"""The HTTP door: OpenRLHF's protocol, over real sockets, onto the same room as gRPC."""

import asyncio
import json

import aiohttp
import pytest
from quartet_reward import http_front
from quartet_reward.scorers.http import HttpScorer
from quartet_reward.server import RewardService

from quartet.clients import RewardClient
from quartet.config import HttpFrontConfig
from quartet.errors import ConfigError
from quartet.testing.loopback import loopback
from quartet.types import ScoreItem
from tests.unit.reward.test_room import ScriptedScorer


@pytest.fixture
async def service():
    return RewardService(ScriptedScorer(max_batches=2), http=HttpFrontConfig(port=0))


@pytest.fixture
async def grpc_client(service):
    async with loopback(service) as address, RewardClient(address) as client:
        yield client


@pytest.fixture
async def ask(service, grpc_client):
    """POST a body; returns (status, answer)."""
    async with aiohttp.ClientSession() as session:

        async def post(body, path="/get_reward"):
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            async with session.post(f"http://{service.http_address}{path}", data=data) as answer:
                return answer.status, await answer.json()

        yield post


def query(*labels):
    texts = [f"q{i}" for i in range(len(labels))]
    return {"query": texts, "prompts": ["q"] * len(labels), "labels": list(labels)}


async def test_rewards_in_order(ask):
    status, answer = await ask(query(1.5, -2.0))
    assert status == 200
    assert answer == {"rewards": [1.5, -2.0], "scores": [0.0, 0.0], "extra_logs": {}}


async def test_an_empty_list_is_answered(ask):
    assert await ask(query()) == (200, {"rewards": [], "scores": [], "extra_logs": {}})


async def test_http_and_grpc_are_one_room(ask, grpc_client, service):
    item = ScoreItem(sample_id="s", prompt="q", query="q0", label=3.0)
    batch = await grpc_client.score(request_id="r", items=[item])
    assert batch.results[0].outcome.reward == (await ask(query(3.0)))[1]["rewards"][0]
    assert (await grpc_client.get_info()).scorers == ("scripted",)


@pytest.mark.parametrize(
    ("labels", "status", "indices"),
    [((1.0, "DATA"), 422, [1]), ((1.0, "INFRA"), 503, [1]), (("unreadable", 1.0), 422, [0])],
)
async def test_a_failed_item_fails_the_call_and_is_named(ask, labels, status, indices):
    found, answer = await ask(query(*labels))
    assert found == status
    assert [entry["index"] for entry in answer["detail"]] == indices
    assert all(entry["message"] for entry in answer["detail"])


async def test_when_nothing_can_be_scored_another_try_may_help(ask):
    assert (await ask(query("INFRA")))[0] == 503


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"no json", "body"),
        ({"prompts": []}, "query"),
        ({"query": "text"}, "query"),
        ({"query": [1]}, "query.0"),
        ({"query": ["a", "b"], "prompts": ["p"]}, "body"),
    ],
)
async def test_what_is_wrong_with_a_request_is_named(ask, body, field):
    status, answer = await ask(body)
    assert status == 422
    assert answer["detail"][0]["field"] == field


async def test_a_request_beyond_the_limit_is_refused(ask, monkeypatch):
    monkeypatch.setattr(http_front, "MAX_BODY_BYTES", 100)
    assert (await ask(b"x" * 101))[0] == 413


async def test_health_follows_the_room(service, grpc_client):
    async with aiohttp.ClientSession() as session:

        async def status():
            async with session.get(f"http://{service.http_address}/healthz") as answer:
                return answer.status

        assert await status() == 200
        await grpc_client.sleep()
        assert await status() == 503
        await grpc_client.wake()
        assert await status() == 200


async def test_our_own_http_scorer_reads_it(service, grpc_client):
    scorer = HttpScorer([f"http://{service.http_address}/get_reward"])
    await scorer.start()
    try:
        item = ScoreItem(sample_id="s", prompt="q", query="qa", label=2.5)
        (outcome,) = await scorer.score(await scorer.prepare([item], ""))
    finally:
        await scorer.stop()
    assert outcome.reward == 2.5


async def test_a_port_that_is_taken_is_an_error_of_the_flag():
    taken = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    async with taken:
        service = RewardService(ScriptedScorer(), http=HttpFrontConfig(port=port))
        with pytest.raises(ConfigError) as caught:
            await service.start()
    assert caught.value.info.field == "http.port"


def test_plain_http_beyond_loopback_is_asked_for():
    config = HttpFrontConfig(host="0.0.0.0", port=5000)
    with pytest.raises(ConfigError) as caught:
        config.check(insecure=False)
    assert caught.value.info.field == "http.host"
    config.check(insecure=True)
    HttpFrontConfig(host="0.0.0.0").check(insecure=False)
    with pytest.raises(ConfigError):
        HttpFrontConfig(port=70000).check(insecure=False)

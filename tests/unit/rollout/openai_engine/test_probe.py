"""What a server lacks is found when the engine opens, and said."""

import pytest

from quartet.errors import ConfigError, RequestError
from quartet.types import LogprobKind
from tests.unit.rollout.openai_engine.asking import config_of, opened, request, tokens
from tests.unit.rollout.openai_engine.fake_server import FakeServer


async def refusal(folder, server, **changes):
    async with server.serve():
        with pytest.raises(ConfigError) as refused:
            async with opened(folder, server, **changes):
                pass
    return refused.value


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("no logprobs", "1 tokens and 0 log-probabilities"),
        ("texts", "'word' is a text, not an id"),
        ("no stops", "does not end a completion with a stop token"),
        ("no top_p", "does not heed top_p"),
        ("refuses", "no such thing"),
    ],
)
async def test_what_a_server_lacks(fault, said, tiny_model_dir):
    error = await refusal(tiny_model_dir, FakeServer(fault))
    assert error.info.reason == "SERVER_LACKS"
    assert error.info.field == "rollout.server_url"
    assert said in str(error)


@pytest.mark.parametrize(
    ("kind", "declared", "said"),
    [
        ("raw", "processed", "give --rollout.server_logprobs raw"),
        ("processed", "raw", "give --rollout.server_logprobs processed"),
        ("warm", "processed", "neither raw nor processed"),
        ("warm", "raw", "neither raw nor processed"),
    ],
)
async def test_other_log_probabilities_than_declared(kind, declared, said, tiny_model_dir):
    server = FakeServer(kind=kind)
    error = await refusal(tiny_model_dir, server, server_logprobs=declared)
    assert error.info.field == "rollout.server_logprobs"
    assert said in str(error)
    assert f"--logprobs-mode {declared}_logprobs" in str(error)


@pytest.mark.parametrize("kind", ["raw", "processed"])
async def test_each_kind_as_declared(kind, tiny_model_dir):
    server = FakeServer(kind=kind)
    async with server.serve(), opened(tiny_model_dir, server, server_logprobs=kind) as engine:
        assert engine.spec.logprob_kinds == (LogprobKind(kind),)
        other = LogprobKind.RAW if kind == "processed" else LogprobKind.PROCESSED
        with pytest.raises(RequestError, match=f"does not report {other}"):
            await engine.generate(request(kind=other))


async def test_placeholders_serve_as_token_ids(tiny_model_dir):
    server = FakeServer("no token_ids")
    async with server.serve(), opened(tiny_model_dir, server) as engine:
        made = await engine.generate(request(temperature=0.0))
    assert tokens(made) == [server.greedy((5, 6, 7), 8)]


async def test_a_server_without_top_k_serves_requests_without_it(tiny_model_dir):
    server = FakeServer("no top_k")
    async with server.serve(), opened(tiny_model_dir, server) as engine:
        assert len(tokens(await engine.generate(request()))[0]) == 8
        with pytest.raises(RequestError, match="does not heed top_k") as refused:
            await engine.generate(request(top_k=3))
    assert refused.value.info.field == "sampling.top_k"


async def test_which_model(tiny_model_dir):
    several = FakeServer(models=("a", "b"))
    error = await refusal(tiny_model_dir, several)
    assert error.info.field == "rollout.server_model"
    assert "has a, b" in str(error)
    error = await refusal(tiny_model_dir, FakeServer(models=("a",)), server_model="c")
    assert "has a, and not c" in str(error)
    async with several.serve(), opened(tiny_model_dir, several, server_model="b") as engine:
        await engine.generate(request())
    assert {body["model"] for body in several.bodies} == {"b"}


async def test_the_key(tiny_model_dir):
    error = await refusal(tiny_model_dir, FakeServer(key="k"), server_key="other")
    assert error.info.field == "rollout.server_key"
    assert "other" not in str(error)
    server = FakeServer(key="k")
    async with server.serve(), opened(tiny_model_dir, server, server_key="k") as engine:
        await engine.generate(request())


async def test_lengths_are_the_shortest_of_three(tiny_model_dir):
    server = FakeServer()
    async with server.serve(), opened(tiny_model_dir, server) as engine:
        assert engine.spec.max_sequence_length == 64


async def test_an_address_with_v1_is_the_same(tiny_model_dir):
    server = FakeServer()
    async with server.serve():
        config = config_of(tiny_model_dir, server, server_url=server.url + "/v1/")
        async with opened(tiny_model_dir, server, server_url=config.rollout.server_url):
            pass
    assert server.bodies


async def test_nobody_there(tiny_model_dir, monkeypatch):
    monkeypatch.setattr("quartet_rollout.engines.openai.watch.GONE_SECONDS", 0.0)
    monkeypatch.setattr(
        "quartet_rollout.engines.openai.engine.wait_for",
        lambda server: wait_for(server, patience=0.0),
    )
    from quartet_rollout.engines.openai.watch import wait_for

    server = FakeServer()
    async with server.serve():
        pass
    with pytest.raises(ConfigError, match="nobody answers") as refused:
        async with opened(tiny_model_dir, server):
            pass
    assert refused.value.info.value == server.url

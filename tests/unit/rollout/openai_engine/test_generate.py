"""Completions by a server: what is asked for, what comes back, what goes wrong."""

import asyncio
from contextlib import AsyncExitStack

import numpy as np
import pytest

from quartet.errors import InfraError, RequestError
from quartet.types import FinishReason, LogprobKind
from tests.unit.rollout.openai_engine.asking import PROMPT, completions, opened, request, tokens
from tests.unit.rollout.openai_engine.fake_server import FakeServer, log_softmax


@pytest.fixture
async def server():
    async with FakeServer().serve() as served:
        yield served


@pytest.fixture
async def engine(server, tiny_model_dir):
    async with opened(tiny_model_dir, server) as made:
        server.bodies.clear()
        yield made


async def test_tokens_in_tokens_out(engine, server):
    made = await engine.generate(request(samples=2, prompts=(PROMPT, (9,))))
    assert [c.sample_id for c in completions(made)] == ["g0-0", "g0-1", "g1-0", "g1-1"]
    assert {c.finish_reason for c in completions(made)} == {FinishReason.LENGTH}
    for body, seed in zip(server.bodies, (0, 1, 10, 11), strict=True):
        assert body["seed"] == seed
        assert body["prompt"] == list(PROMPT if seed < 10 else (9,))
        assert body["return_token_ids"] is True
        assert body["stream"] is True
        # Whatever the model's generation_config.json says.
        assert (body["repetition_penalty"], body["min_p"]) == (1.0, 0.0)
    for completion, body in zip(completions(made), server.bodies, strict=True):
        context = list(body["prompt"])
        for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
            assert logprob == pytest.approx(log_softmax(server.logits(context))[token], abs=1e-5)
            context.append(int(token))
        assert [(s.policy_version, s.start, s.end) for s in completion.versions] == [(0, 0, 8)]
    assert engine.num_in_flight == 0


async def test_greedy_and_stop_tokens(engine, server):
    greedy = server.greedy(PROMPT, 8)
    made = await engine.generate(request(temperature=0.0, stop_token_ids=(greedy[4],)))
    [completion] = completions(made)
    assert completion.token_ids.tolist() == greedy[: greedy.index(greedy[4]) + 1]
    assert completion.finish_reason is FinishReason.STOP
    assert completion.logprobs.tolist() == [0.0] * len(completion.token_ids)


async def test_a_stop_token_that_comes_too_early_is_drawn_again(engine, server):
    stop = tokens(await engine.generate(request()))[0][0]
    server.bodies.clear()
    made = await engine.generate(request(stop_token_ids=(stop,), min_new_tokens=1))
    [completion] = completions(made)
    assert completion.token_ids[0] != stop
    assert len({body["seed"] for body in server.bodies}) == len(server.bodies) > 1
    wanted = log_softmax(server.logits(PROMPT))[completion.token_ids[0]]
    assert completion.logprobs[0] == pytest.approx(wanted, abs=1e-5)


async def test_what_does_not_fit_is_refused_before_it_is_asked(engine, server):
    with pytest.raises(RequestError) as refused:
        await engine.generate(request(prompts=((5,) * 64,)))
    assert refused.value.info.reason == "PROMPT_TOO_LONG"
    with pytest.raises(RequestError) as refused:
        await engine.generate(request(prompts=((384,),)))
    assert refused.value.info.reason == "TOKEN_UNKNOWN"
    with pytest.raises(RequestError) as refused:
        await engine.generate(request(isolated=True))
    assert refused.value.info.reason == "ISOLATED_UNSUPPORTED"
    with pytest.raises(RequestError) as refused:
        await engine.generate(request(kind=LogprobKind.RAW))
    assert refused.value.info.reason == "LOGPROB_KIND_UNSUPPORTED"
    assert server.bodies == []


async def test_a_number_that_is_none_fails_its_sample(engine, server):
    server.faults.add("nan")
    [completion] = completions(await engine.generate(request()))
    assert completion.failure.error_class == "DATA"
    assert completion.failure.reason == "LOGITS_NOT_FINITE"


@pytest.mark.parametrize(
    ("fault", "error", "reason"),
    [
        ("refuses", RequestError, "SERVER_REFUSES"),
        ("fails", InfraError, "ENGINE_FAILED"),
        ("error event", InfraError, "ENGINE_FAILED"),
        ("breaks", InfraError, "SERVER_DOWN"),
        ("no logprobs", InfraError, "ANSWER_MALFORMED"),
    ],
)
async def test_what_a_failing_server_becomes(fault, error, reason, engine, server):
    server.faults.add(fault)
    with pytest.raises(error) as failed:
        await engine.generate(request(samples=2))
    assert failed.value.info.reason == reason
    assert engine.num_in_flight == 0


async def test_a_server_that_is_away_fails_the_call(tiny_model_dir):
    server = FakeServer()
    async with AsyncExitStack() as serving:
        await serving.enter_async_context(server.serve())
        async with opened(tiny_model_dir, server) as engine:
            await serving.aclose()
            with pytest.raises(InfraError, match="cannot be reached") as failed:
                await engine.generate(request())
    assert failed.value.info.reason == "SERVER_DOWN"


async def test_a_cancelled_call_closes_its_requests(engine, server):
    server.steps.clear()
    server.free_tokens = 2
    call = asyncio.ensure_future(engine.generate(request(samples=3)))
    await server.stepped.wait()
    assert engine.num_in_flight == 3
    call.cancel()
    await asyncio.wait({call})
    await asyncio.wait_for(server.disconnected.wait(), 10)
    assert engine.num_in_flight == 0
    server.steps.set()
    assert len(tokens(await engine.generate(request()))[0]) == 8


async def test_no_more_requests_than_sequences(engine, server):
    server.steps.clear()
    call = asyncio.ensure_future(engine.generate(request(samples=20)))
    await server.stepped.wait()
    assert engine.num_in_flight == 20
    server.steps.set()
    made = await call
    assert len({tuple(t) for t in tokens(made)}) > 10
    assert max(len(c.token_ids) for c in completions(made)) == 8


async def test_min_p_of_nothing(engine, server):
    """Nothing that is asked for is left to the server's defaults."""
    await engine.generate(request(temperature=0.7, top_p=0.9, top_k=5))
    [body] = server.bodies
    assert (body["temperature"], body["top_p"], body["top_k"]) == (0.7, 0.9, 5)
    assert body["max_tokens"] == 8
    assert np.isclose(body["presence_penalty"], 0.0)

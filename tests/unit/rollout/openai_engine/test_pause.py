"""Pauses, with a server that can stand still and with one that cannot."""

import asyncio

import pytest

from quartet.errors import StateError
from quartet.types import FinishReason, PauseMode
from tests.unit.rollout.openai_engine.asking import (
    completions,
    opened,
    request,
    settled,
    tokens,
)
from tests.unit.rollout.openai_engine.fake_server import FakeServer


@pytest.fixture(params=[True, False], ids=["dev", "plain"])
async def server(request):
    async with FakeServer(dev=request.param).serve() as served:
        yield served


@pytest.fixture
async def engine(server, tiny_model_dir):
    async with opened(tiny_model_dir, server) as made:
        server.bodies.clear()
        yield made


async def begun(engine, server, **sampling):
    """A call that has three tokens of each sample and waits."""
    server.steps.clear()
    server.free_tokens = 3
    call = asyncio.ensure_future(engine.generate(request(**sampling)))
    await settled(server)
    return call


async def test_keep_holds_between_two_tokens(engine, server):
    call = await begun(engine, server)
    assert await engine.pause(PauseMode.KEEP) == 1
    server.steps.set()
    later = asyncio.ensure_future(engine.generate(request()))
    await asyncio.wait({call, later}, timeout=0.2)
    assert not call.done()
    assert not later.done()
    assert await engine.resume() == 2
    assert [len(t) for t in tokens(await call)] == [8]
    assert [len(t) for t in tokens(await later)] == [8]
    # The same requests all along: asked for again they would draw other tokens.
    assert len(server.bodies) == 2


async def test_abort_ends_what_has_tokens(engine, server):
    call = await begun(engine, server)
    await engine.pause(PauseMode.ABORT)
    [completion] = completions(await call)
    assert completion.finish_reason is FinishReason.ABORTED
    assert len(completion.token_ids) == 3
    later = asyncio.ensure_future(engine.generate(request()))
    await asyncio.wait({later}, timeout=0.1)
    assert not later.done()
    server.steps.set()
    await engine.resume()
    assert len(tokens(await later)[0]) == 8


async def test_abort_ends_what_was_held(engine, server):
    call = await begun(engine, server)
    await engine.pause(PauseMode.KEEP)
    await engine.pause(PauseMode.ABORT)
    [completion] = completions(await asyncio.wait_for(call, 10))
    assert completion.finish_reason is FinishReason.ABORTED


async def test_drain_waits_for_what_runs_and_lets_nobody_in(engine, server):
    call = await begun(engine, server)
    drained = asyncio.ensure_future(engine.pause(PauseMode.DRAIN))
    await asyncio.sleep(0)
    later = asyncio.ensure_future(engine.generate(request()))
    await asyncio.wait({drained, later}, timeout=0.1)
    assert not drained.done()
    server.steps.set()
    await drained
    assert not later.done()
    await call
    await engine.resume()
    await later


async def test_it_does_not_sleep(engine):
    assert "sleep" not in engine.spec.capabilities
    with pytest.raises(StateError) as refused:
        await engine.sleep(1)
    assert refused.value.info.reason == "SLEEP_DISABLED"

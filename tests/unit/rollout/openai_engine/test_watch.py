"""A server that goes away, comes back, or is another one."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from quartet_rollout.engines.openai import watch

from quartet.errors import InfraError
from tests.unit.rollout.openai_engine.asking import opened, request, tokens
from tests.unit.rollout.openai_engine.fake_server import FakeServer


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.02)


async def test_a_server_that_somebody_else_pushed_to(tiny_model_dir):
    async with FakeServer(dev=True).serve() as server, opened(tiny_model_dir, server) as engine:
        failed = asyncio.ensure_future(engine.failed())
        await engine.generate(request())
        assert not failed.done()
        server.version = "theirs"
        with pytest.raises(InfraError, match="no longer has the weights"):
            await engine.generate(request())
        assert (await asyncio.wait_for(failed, 20)).info.reason == "SERVER_REPLACED"


@pytest.mark.parametrize("hook", [False, True])
async def test_a_server_that_comes_back(hook, tiny_model_dir, caplog):
    """One policy for ever: the engine goes on. Told of weights: it has forgotten them."""
    server = FakeServer()
    async with AsyncExitStack() as serving:
        await serving.enter_async_context(server.serve())
        flags = {"server_weights": server.url + "/hook"} if hook else {}
        async with opened(tiny_model_dir, server, **flags) as engine:
            failed = asyncio.ensure_future(engine.failed())
            await serving.aclose()
            while "is away" not in caplog.text:  # noqa: ASYNC110 - a log has no event
                await asyncio.sleep(0.02)
            async with server.serve(server.port):
                if hook:
                    assert (await asyncio.wait_for(failed, 20)).info.reason == "SERVER_REPLACED"
                    return
                assert len(tokens(await engine.generate(request()))[0]) == 8
                assert not failed.done()
                failed.cancel()


async def test_a_server_that_stays_away(tiny_model_dir):
    server = FakeServer()
    async with AsyncExitStack() as serving:
        await serving.enter_async_context(server.serve())
        async with opened(tiny_model_dir, server) as engine:
            await serving.aclose()
            why = await asyncio.wait_for(watch.gone(engine._server, engine._door, patience=0.1), 20)
    assert why.info.reason == "ENGINE_DEAD"

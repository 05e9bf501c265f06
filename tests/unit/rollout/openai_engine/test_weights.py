"""New weights at a server: in which order, what becomes of completions, and what can fail."""

import asyncio
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from quartet.errors import ConfigError, FatalError, InfraError
from quartet.types import FinishReason, PauseMode, PushBackend
from tests.unit.rollout.openai_engine.asking import (
    PROMPT,
    completions,
    opened,
    request,
    settled,
    tokens,
)
from tests.unit.rollout.openai_engine.fake_server import EMBEDDINGS, FakeServer


@pytest.fixture
def weights(tiny_model_dir):
    """All tensors of the model, with other embeddings."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    tensors = {name: p.detach().clone() for name, p in model.named_parameters()}
    tensors[EMBEDDINGS][0, 0] = 0.25
    return tensors


@pytest.fixture
async def server():
    async with FakeServer(dev=True).serve() as served:
        yield served


@pytest.fixture
async def engine(server, tiny_model_dir):
    async with opened(tiny_model_dir, server) as made:
        server.told.clear()
        server.bodies.clear()
        yield made


def paths(server):
    return [path for path, _ in server.told if path != "/weight_info"]


async def test_a_push_is_loaded_while_the_server_stands_still(engine, server, weights):
    assert engine.spec.push_backends == (PushBackend.FILE,)
    old = tokens(await engine.generate(request(temperature=0.0)))
    await engine.load_weights(iter(weights.items()), 3)
    assert paths(server) == [
        "/pause",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/update_weight_version",
        "/resume",
    ]
    told = dict(server.told)
    assert told["/pause"]["mode"] == "keep"
    assert told["/reset_prefix_cache"] == {"reset_running_requests": "true"}
    assert server.seen["tensors"].keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(torch.from_numpy(server.seen["tensors"][name]), tensor)
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= set(server.seen["files"])
    assert not os.path.exists(server.seen["folder"])  # noqa: ASYNC240
    made = await engine.generate(request(temperature=0.0))
    assert tokens(made) == [server.greedy(PROMPT, 8)] != old
    assert [s.policy_version for s in completions(made)[0].versions] == [3]


async def test_what_runs_keeps_its_tokens_and_goes_on(engine, server, weights):
    server.steps.clear()
    server.free_tokens = 3
    call = asyncio.ensure_future(engine.generate(request(samples=2, max_new_tokens=6)))
    await settled(server, 2)
    assert await engine.load_weights(weights.items(), 1) == 2
    server.steps.set()
    for completion in completions(await call):
        assert [(s.policy_version, s.start, s.end) for s in completion.versions] == [
            (0, 0, 3),
            (1, 3, 6),
        ]
    second = [body for body in server.bodies if len(body["prompt"]) == len(PROMPT) + 3]
    assert [body["max_tokens"] for body in second] == [3, 3]
    # The server's generator begins anew: with the same seed it would draw the same numbers.
    assert len({body["seed"] for body in server.bodies[-4:]}) == 4


@pytest.mark.parametrize("fault", ["collective rpc fails", "keeps caches", "loses a tensor"])
async def test_half_a_load_holds_the_engine_until_a_whole_one(fault, engine, server, weights):
    server.steps.clear()
    server.free_tokens = 2
    call = asyncio.ensure_future(engine.generate(request(max_new_tokens=6)))
    await settled(server)
    server.faults.add(fault)
    with pytest.raises(FatalError, match="half old and half new") as torn:
        await engine.load_weights(weights.items(), 1)
    assert torn.value.info.reason == "WEIGHTS_TORN"
    server.steps.set()
    [completion] = completions(await call)
    assert completion.finish_reason is FinishReason.ABORTED
    assert len(completion.token_ids) == 2
    assert not server.unpaused.is_set()
    with pytest.raises(InfraError, match="not whole"):
        await engine.generate(request())
    await engine.pause(PauseMode.ABORT)
    await engine.resume()
    assert not server.unpaused.is_set()
    server.faults.clear()
    await engine.load_weights(weights.items(), 2)
    made = await engine.generate(request(temperature=0.0))
    assert tokens(made) == [server.greedy(PROMPT, 8)]


async def test_a_server_that_does_not_stand_still_keeps_its_weights(engine, server, weights):
    server.faults.add("pause fails")
    with pytest.raises(InfraError) as failed:
        await engine.load_weights(weights.items(), 1)
    assert not isinstance(failed.value, FatalError)
    assert "/collective_rpc" not in paths(server)
    made = await engine.generate(request())
    assert completions(made)[0].versions[0].policy_version == 0


async def test_a_pause_outlives_a_push(engine, server, weights):
    await engine.pause(PauseMode.KEEP)
    call = asyncio.ensure_future(engine.generate(request(temperature=0.0)))
    await engine.load_weights(weights.items(), 1)
    await asyncio.wait({call}, timeout=0.1)
    assert not call.done()
    assert not server.unpaused.is_set()
    await engine.resume()
    assert completions(await call)[0].versions[0].policy_version == 1


async def test_an_engine_that_opens_again_gets_the_model_back(tiny_model_dir, server, weights):
    async with opened(tiny_model_dir, server) as engine:
        await engine.load_weights(weights.items(), 5)
        assert server.weights == pytest.approx(0.25)
    async with opened(tiny_model_dir, server):
        assert server.weights == 0.0
        assert server.version.endswith("-0")


async def test_without_the_extension_a_tied_head_would_stay_old(tiny_model_dir):
    async with FakeServer(dev=True, extension=False).serve() as server:
        with pytest.raises(ConfigError, match="tied embeddings on a CPU") as refused:
            async with opened(tiny_model_dir, server):
                pass
    assert "--worker-extension-cls" in refused.value.info.remedy


async def test_development_mode_is_asked_for_by_name(tiny_model_dir):
    async with FakeServer().serve() as server:
        with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE=1"):
            async with opened(tiny_model_dir, server, server_weights="vllm"):
                pass


async def test_a_server_that_takes_nothing_serves_one_policy(tiny_model_dir):
    for dev, words in ((False, "auto"), (True, "none")):
        async with (
            FakeServer(dev=dev).serve() as server,
            opened(tiny_model_dir, server, server_weights=words) as engine,
        ):
            assert engine.spec.push_backends == ()
            assert server.told == []


async def test_another_machine_needs_a_folder_that_both_see(tiny_model_dir):
    async with FakeServer().serve() as server:
        with pytest.raises(ConfigError) as refused:
            async with opened(tiny_model_dir, server, server_weights="http://10.1.2.3:4/load"):
                pass
    assert refused.value.info.field == "rollout.server_folder"


async def test_a_hook_is_told_of_a_folder(tiny_model_dir, weights, tmp_path):
    async with FakeServer().serve() as server:
        flags = {"server_weights": server.url + "/hook", "server_folder": str(tmp_path / "new")}
        async with opened(tiny_model_dir, server, **flags) as engine:
            assert engine.spec.push_backends == (PushBackend.FILE,)
            [(_, first)] = server.told
            assert first == {"path": str(tiny_model_dir), "policy_version": 0}
            await engine.load_weights(weights.items(), 4)
            _, second = server.told[-1]
            assert second["policy_version"] == 4
            assert Path(second["path"]).parent == tmp_path / "new"
            assert server.weights == pytest.approx(0.25)
            assert list((tmp_path / "new").iterdir()) == []
            server.faults.add("hook fails")
            with pytest.raises(FatalError):
                await engine.load_weights(weights.items(), 5)

"""The engine openai against vLLM's own server: one server a model, because it takes long to start.
The tests run in order; the last one of a server ends it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import torch
from quartet_rollout.engines.openai import weights as openai_weights
from quartet_rollout.engines.openai.doors import EXTENSION
from quartet_rollout.server import RolloutService
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quartet.clients import RolloutClient
from quartet.config import RolloutServeConfig
from quartet.config.ds import LoadConfig
from quartet.config.sampling import RolloutEngineConfig
from quartet.errors import InfraError, StateError
from quartet.testing.conformance import run_checks
from quartet.testing.conformance.rollout import CHECKS, RolloutSubject
from quartet.testing.loopback import loopback
from quartet.testing.tiny import TinyShape, make_tiny_model
from quartet.types import PauseMode, PromptGroup, PushBackend, ReplicaState, SamplingParams
from quartet.weights import manifest_of_model, pack_bucket, plan_buckets, push_weights

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("QUARTET_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="`make setup-vllm` has not been run"),
]

# vLLM's kernels for CPUs take heads of 32 and more.
SHAPE = TinyShape(heads=2, kv_heads=1)
BLOCK_SIZE = 32
KEY = "a-key"
PROMPTS = ((5, 6, 7, 8), tuple(itertools.islice(itertools.cycle(range(20, 70)), 3 * BLOCK_SIZE)))
"""One that fits into a block of the cache, and one whose blocks the cache keeps."""
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
TIED = pytest.mark.parametrize("served", ["tied"], indirect=True)
BOTH = pytest.mark.parametrize("served", ["tied", "untied"], indirect=True)


class Served:
    """vLLM's server with a tiny model, in a process of its own."""

    def __init__(self, model: Path) -> None:
        self.model = model
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            [
                *(str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
                *("--host", "127.0.0.1", "--port", str(port), "--api-key", KEY),
                *("--dtype", "float32", "--enforce-eager", "--max-model-len", "512"),
                *("--max-num-seqs", "16", "--kv-cache-memory-bytes", str(128 << 20)),
                *("--enable-prefix-caching", "--block-size", str(BLOCK_SIZE)),
                *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
                *("--worker-extension-cls", EXTENSION),
            ],
            env=os.environ | ENVIRONMENT,
            start_new_session=True,
        )

    def end(self) -> None:
        """Its engine's processes are in its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)

    def service(self) -> RolloutService:
        rollout = RolloutEngineConfig(
            model_name_or_path=str(self.model),
            engine="openai",
            server_url=self.url,
            server_key=KEY,
            max_num_sequences=16,
        )
        return RolloutService(
            RolloutServeConfig(rollout=rollout, ds=LoadConfig(param_dtype="fp32"))
        )

    async def running(self) -> float:
        """Requests that vLLM works on, as it says itself."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/metrics") as answer:
            text = await answer.text()
        found = re.findall(r"^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)$", text, re.M)
        assert len(found) == 2, text
        return sum(map(float, found))


@pytest.fixture(scope="module")
def served(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / request.param
    server = Served(make_tiny_model(folder, shape=SHAPE, tied=request.param == "tied"))
    try:
        yield server
    finally:
        server.end()


def groups(samples=1):
    return [
        PromptGroup(
            group_id=str(i),
            prompt_token_ids=prompt,
            num_samples=samples,
            seeds=tuple(range(10 * i, 10 * i + samples)),
        )
        for i, prompt in enumerate(PROMPTS)
    ]


async def generate(address, samples=1, **sampling):
    async with RolloutClient(address, retry=False) as client:
        return await client.generate(
            request_id=f"test-{time.time_ns()}",
            groups=groups(samples),
            sampling=SamplingParams(**({"min_new_tokens": 0} | sampling)),
        )


async def info_of(address):
    async with RolloutClient(address) as client:
        return await client.get_info()


async def push(address, model, version, folder):
    manifest = manifest_of_model(model, bucket_bytes=1 << 16)
    tensors = dict(model.named_parameters())
    async with RolloutClient(address) as client:
        return await push_weights(
            manifest=manifest,
            tensors=lambda: ((b.index, pack_bucket(b, tensors)) for b in plan_buckets(manifest)),
            replicas=[client],
            epoch=time.time_ns(),
            policy_version=version,
            backend=PushBackend.FILE,
            folder=folder,
        )


def perturbed(folder, seed):
    """The model with other embeddings, and so with another head where it is tied."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight += 0.05 * torch.randn(weight.shape, generator=noise)
    return model


def logprobs_of(model, prompt, tokens):
    """What transformers gives for `tokens` after `prompt`, at temperature 1."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens)].numpy()


def greedy_of(model, prompt, count):
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count
    )
    return out[0, len(prompt) :].tolist()


async def require_weights_of(address, model, version):
    """Greedy tokens are the model's, and so are log-probabilities of what is sampled."""
    greedy = await generate(address, temperature=0.0, max_new_tokens=16)
    for group, prompt in zip(greedy.groups, PROMPTS, strict=True):
        [completion] = group.completions
        assert completion.token_ids.tolist() == greedy_of(model, prompt, 16)
        assert {span.policy_version for span in completion.versions} == {version}
    sampled = await generate(address, samples=4, max_new_tokens=16)
    for group, prompt in zip(sampled.groups, PROMPTS, strict=True):
        for completion in group.completions:
            wanted = logprobs_of(model, prompt, completion.token_ids.tolist())
            np.testing.assert_allclose(completion.logprobs, wanted, atol=1e-4)
    return [group.completions[0].token_ids.tolist() for group in greedy.groups]


@TIED
async def test_conformance(served):
    async with loopback(served.service()) as address:
        subject = RolloutSubject(address=address, reference=str(served.model), is_exclusive=True)
        results = await run_checks(CHECKS, subject)
    assert {r.name: r.message for r in results if r.outcome == "failed"} == {}
    skipped = {r.name for r in results if r.outcome == "skipped"}
    assert "matches_the_reference_in_logprobs" not in skipped


@BOTH
async def test_a_push_by_file_reaches_every_weight(served, tmp_path):
    async with loopback(served.service()) as address:
        was = AutoModelForCausalLM.from_pretrained(served.model)
        before = await require_weights_of(address, was, 0)
        for version in (1, 2):
            model = perturbed(served.model, version)
            result = await push(address, model, version, str(tmp_path))
            assert all(replica.committed for replica in result.replicas), result
            after = await require_weights_of(address, model, version)
            assert all(old != new for old, new in zip(before, after, strict=True))
    # A service that is started again serves the model on the disk as version 0.
    async with loopback(served.service()) as address:
        assert (await info_of(address)).policy_version == 0
        assert await require_weights_of(address, was, 0) == before


@TIED
async def test_what_runs_goes_on_with_the_new_weights(served, tmp_path):
    """Every token's log-probability is that of the version which the completion names for it."""
    models = {1: perturbed(served.model, 3), 2: perturbed(served.model, 4)}
    async with loopback(served.service()) as address:
        await push(address, models[1], 1, str(tmp_path))
        running = asyncio.ensure_future(
            generate(address, samples=2, max_new_tokens=300, ignore_eos=True)
        )
        while not await served.running() and not running.done():
            await asyncio.wait({running}, timeout=0.01)
        await asyncio.wait({running}, timeout=0.5)  # some tokens of the old version
        async with RolloutClient(address) as client:
            held = await client.pause(PauseMode.KEEP)
            await push(address, models[2], 2, str(tmp_path))
            assert not running.done()
            await client.resume()
        result = await running
    assert held == 4
    for group, prompt in zip(result.groups, PROMPTS, strict=True):
        for completion in group.completions:
            tokens = completion.token_ids.tolist()
            assert len(tokens) == 300
            assert [s.policy_version for s in completion.versions][-1] == 2
            for span in completion.versions:
                wanted = logprobs_of(models[span.policy_version], prompt, tokens)
                cut = slice(span.start, span.end)
                np.testing.assert_allclose(completion.logprobs[cut], wanted[cut], atol=1e-4)
    spans = [len(c.versions) for group in result.groups for c in group.completions]
    assert max(spans) == 2, "nothing was made before the push"


@TIED
async def test_a_pause_changes_nothing_of_what_is_drawn(served):
    sampling = {"samples": 2, "max_new_tokens": 120, "ignore_eos": True}
    async with loopback(served.service()) as address:
        whole = await generate(address, **sampling)
        running = asyncio.ensure_future(generate(address, **sampling))
        while not await served.running() and not running.done():
            await asyncio.wait({running}, timeout=0.01)
        async with RolloutClient(address) as client:
            await client.pause(PauseMode.KEEP)
            await client.resume()
        result = await running
    for got, wanted in zip(result.groups, whole.groups, strict=True):
        for one, other in zip(got.completions, wanted.completions, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()


@TIED
async def test_a_cancelled_call_ends_its_requests_in_the_server(served):
    async with loopback(served.service()) as address:
        call = asyncio.ensure_future(generate(address, samples=8, ignore_eos=True))
        while not await served.running() and not call.done():
            await asyncio.wait({call}, timeout=0.01)
        assert not call.done()
        call.cancel()
        async with asyncio.timeout(30):
            while await served.running():  # noqa: ASYNC110 - vLLM has no event for it
                await asyncio.sleep(0.05)
        assert (await info_of(address)).completions_in_flight == 0


@BOTH
async def test_half_a_load_is_stale_until_a_push_is_whole(served, tmp_path, monkeypatch):
    def spoilt(tensors, **arguments):
        return spoil(openai_weights_written(tensors, **arguments))

    @contextlib.contextmanager
    def spoil(folder_of):
        """The second half of the tensors is not in the file, and one has another shape."""
        with folder_of as folder:
            path = folder / "model.safetensors"
            tensors = dict(sorted(load_file(path).items()))
            kept = dict(itertools.islice(tensors.items(), len(tensors) // 2))
            last = next(reversed(kept))
            save_file(kept | {last: torch.zeros(3, 5)}, path)
            yield folder

    openai_weights_written = openai_weights.written
    async with loopback(served.service()) as address:
        with monkeypatch.context() as patch:
            patch.setattr(openai_weights, "written", spoilt)
            result = await push(address, perturbed(served.model, 5), 1, str(tmp_path))
        [replica] = result.replicas
        assert replica.failed_phase == "commit"
        assert "half old and half new" in replica.error
        assert (await info_of(address)).state is ReplicaState.STALE
        with pytest.raises(StateError):
            await generate(address, max_new_tokens=1)
        model = perturbed(served.model, 6)
        result = await push(address, model, 2, str(tmp_path))
        assert [replica.committed for replica in result.replicas] == [True], result
        await require_weights_of(address, model, 2)


@BOTH
async def test_a_server_that_somebody_else_pushed_to_ends_the_engine(served):
    service = served.service()
    async with loopback(service) as address:
        await generate(address, max_new_tokens=1)
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as session:
            body = {"new_version": "theirs"}
            async with session.post(f"{served.url}/update_weight_version", json=body) as answer:
                assert answer.status == 200
        with pytest.raises(InfraError, match="no longer has the weights"):
            await generate(address, max_new_tokens=1)
        why = await asyncio.wait_for(service.failed(), 60)
    assert why.info.reason == "SERVER_REPLACED"


@BOTH
async def test_a_server_that_dies_fails_calls_at_once(served):
    """Calls end so that others may answer them; the last test of a server."""
    async with loopback(served.service()) as address:
        call = asyncio.ensure_future(generate(address, max_new_tokens=400, ignore_eos=True))
        while not await served.running() and not call.done():
            await asyncio.wait({call}, timeout=0.01)
        await asyncio.to_thread(served.end)
        with pytest.raises(InfraError):
            await asyncio.wait_for(call, 60)
        with pytest.raises(InfraError, match="cannot be reached"):
            await generate(address, max_new_tokens=1)

"""The real vLLM engine on two tensor parallel workers, which are themselves the members of pushes.

One engine for all of it. What `test_vllm.py` asserts of one worker holds for two; the tests run in
order, and the last one kills a worker.
"""

from __future__ import annotations

import asyncio
import signal

import psutil
import pytest

from quartet.clients import RolloutClient
from quartet.types import PushBackend
from tests.integration import test_vllm
from tests.integration.test_vllm import Engine, generate, greedy_of, perturbed, push, version_of
from tests.integration.test_vllm import model_dir as model_dir

pytestmark = test_vllm.pytestmark


@pytest.fixture(scope="module")
def engine(model_dir, tmp_path_factory):
    flags = ("--vllm.tensor_parallel_size", "2", "--vllm.gloo_into", "workers")
    made = Engine(model_dir, tmp_path_factory.mktemp("service"), *flags)
    try:
        yield asyncio.run(made.serving())
    finally:
        made.end()


async def test_conformance(engine, model_dir):
    """With the weights that the engine was started with: the first of all."""
    await test_vllm.test_conformance(engine, model_dir)


async def test_each_worker_is_a_rank(engine):
    async with RolloutClient(engine.address) as client:
        info = await client.get_info()
    assert info.ranks_in(PushBackend.GLOO) == 2
    assert info.ranks_in(PushBackend.FILE) == 1


@pytest.mark.parametrize("seed", [1, 2])
async def test_a_push_reaches_every_weight_of_both(engine, model_dir, seed):
    await test_vllm.test_a_push_reaches_every_weight(engine, model_dir, seed)


async def test_what_runs_goes_on_with_the_new_weights_of_both(engine, model_dir):
    await test_vllm.test_what_runs_goes_on_with_the_new_weights(engine, model_dir)


async def test_a_push_by_files_reaches_both_workers(engine, model_dir, tmp_path):
    """The service reads them into memory that both workers map."""
    model, version = perturbed(model_dir, 7), await version_of(engine) + 1
    await push(engine, model, version, backend=PushBackend.FILE, folder=str(tmp_path))
    made = await generate(engine, temperature=0.0, max_new_tokens=16)
    for group, prompt in zip(made.groups, test_vllm.PROMPTS, strict=True):
        [completion] = group.completions
        assert completion.token_ids.tolist() == greedy_of(model, prompt, 16)
        assert {span.policy_version for span in completion.versions} == {version}
    assert list(tmp_path.iterdir()) == []


async def test_the_death_of_one_worker_ends_the_service(engine):
    children = psutil.Process(engine.process.pid).children(recursive=True)
    workers = [p for p in children if "Worker_TP" in " ".join(p.cmdline())]
    assert len(workers) == 2
    workers[-1].send_signal(signal.SIGKILL)
    assert await asyncio.to_thread(engine.process.wait, 100) == 1
    # Python's own helpers clean up behind the others, and end last.
    _, alive = await asyncio.to_thread(psutil.wait_procs, children, timeout=60)
    assert alive == []

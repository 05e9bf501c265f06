"""The real vLLM engine, in its own environment: one engine for all of it, because it takes long to
start. The tests run in order; the last one kills it."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from quartet.clients import RolloutClient
from quartet.testing.conformance import run_checks
from quartet.testing.conformance.rollout import CHECKS, RolloutSubject
from quartet.testing.tiny import TinyShape, make_tiny_model
from quartet.types import PauseMode, PromptGroup, PushBackend, ReplicaState, SamplingParams
from quartet.weights import manifest_of_model, pack_bucket, plan_buckets, push_weights

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("QUARTET_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="`make setup-vllm` has not been run"),
]

# vLLM's kernels for CPUs take heads of 32 and more.
SHAPE = TinyShape(heads=2, kv_heads=1)
BLOCK_SIZE = 32
PROMPTS = ((5, 6, 7, 8), tuple(itertools.islice(itertools.cycle(range(20, 70)), 3 * BLOCK_SIZE)))
"""One that fits into a block of the cache, and one whose blocks the cache keeps."""
REWARD = "def reward_func(queries, prompts, labels, **kwargs):\n    import torch\n" + (
    "    rewards = torch.tensor([len(q) % 5 / 5 for q in queries])\n"
    "    return {'rewards': rewards, 'scores': rewards, 'extra_logs': {}}\n"
)


# A machine may be too fast, or too slow, to meet a completion in its middle.
MAY_BE_SKIPPED = {
    "keeps_deadlines",
    "stops_cancelled_calls",
    "works_once_for_all_repeats",
    "keeps_what_runs_in_a_pause",
    "ends_what_runs_where_a_pause_aborts",
    "drains_before_it_pauses",
    "finishes_calls_before_it_sleeps",
    "names_the_version_of_each_token",
    "computes_nothing_without_weights",
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("vllm") / "tiny", shape=SHAPE)


class Engine:
    """`quartet serve rollout` with vLLM, in a process of its own."""

    def __init__(self, model, folder, *flags):
        self.ready_file = folder / "ready.json"
        self.address = self.metrics_address = ""
        self.process = subprocess.Popen(
            [
                *(str(PYTHON), "-m", "quartet", "serve", "rollout"),
                *("--rollout.model_name_or_path", str(model), "--rollout.engine", "vllm"),
                *("--rollout.max_num_sequences", "16", "--ds.param_dtype", "fp32"),
                *("--vllm.enable_prefix_caching", "--vllm.extra", f"block_size={BLOCK_SIZE}"),
                *("--rpc.port", "0", "--rpc.die_with_parent", "--metrics.port", "0"),
                *("--rpc.ready_file", str(self.ready_file)),
                *flags,
            ],
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )

    async def serving(self):
        while not self.ready_file.exists():
            assert self.process.poll() is None, "the service ended at its start"
            await asyncio.sleep(0.1)
        ready = json.loads(self.ready_file.read_text())
        self.address, self.metrics_address = ready["address"], ready["metrics_address"]
        async with RolloutClient(self.address) as client:
            await client.wait_ready(500)
        return self

    def end(self):
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(60)


@pytest.fixture(scope="module")
def engine(model_dir, tmp_path_factory):
    made = Engine(model_dir, tmp_path_factory.mktemp("service"))
    try:
        yield asyncio.run(made.serving())
    finally:
        made.end()


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


async def generate(engine, samples=1, **sampling):
    async with RolloutClient(engine.address) as client:
        return await client.generate(
            request_id=f"test-{time.time_ns()}",
            groups=groups(samples),
            sampling=SamplingParams(**({"min_new_tokens": 0} | sampling)),
        )


async def version_of(engine):
    async with RolloutClient(engine.address) as client:
        info = await client.get_info()
    assert info.state is ReplicaState.SERVING
    return info.policy_version


async def push(engine, model, version, **how):
    manifest = manifest_of_model(model, bucket_bytes=1 << 16)
    tensors = dict(model.named_parameters())
    async with RolloutClient(engine.address) as client:
        result = await push_weights(
            manifest=manifest,
            tensors=lambda: ((b.index, pack_bucket(b, tensors)) for b in plan_buckets(manifest)),
            replicas=[client],
            epoch=time.time_ns(),
            policy_version=version,
            **({"backend": PushBackend.GLOO} | how),
        )
    assert all(replica.committed for replica in result.replicas), result


def prompt_tokens(engine):
    """Tokens of prompts so far, by where they came from."""
    url = f"http://{engine.metrics_address}/metrics"
    with urllib.request.urlopen(url, timeout=60) as answer:
        page = answer.read().decode()
    sums = re.findall(r'^quartet_rollout_prompt_tokens_total{source="(\w+)"} (\S+)$', page, re.M)
    return {source: int(float(count)) for source, count in sums}


def perturbed(model_dir, seed):
    """The model with other embeddings, and so with another tied head."""
    model = AutoModelForCausalLM.from_pretrained(model_dir)
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


async def test_conformance(engine, model_dir):
    subject = RolloutSubject(address=engine.address, reference=str(model_dir), is_exclusive=True)
    results = await run_checks(CHECKS, subject)
    assert {r.name: r.message for r in results if r.outcome == "failed"} == {}
    skipped = {r.name for r in results if r.outcome == "skipped"}
    assert skipped <= MAY_BE_SKIPPED


async def test_samples_of_a_prompt_compute_it_once(engine):
    before = prompt_tokens(engine)
    prompt = tuple(range(100, 100 + 3 * BLOCK_SIZE + 1))  # of no call before
    async with RolloutClient(engine.address) as client:
        await client.generate(
            request_id="shared",
            groups=[PromptGroup(group_id="g", prompt_token_ids=prompt, num_samples=4)],
            sampling=SamplingParams(max_new_tokens=4, min_new_tokens=0),
        )
    # Whole blocks are shared; the last token is computed for each sample's first logits.
    made = {source: count - before[source] for source, count in prompt_tokens(engine).items()}
    assert made == {"computed": len(prompt) + 3, "cache": 3 * 3 * BLOCK_SIZE}


def test_ppo(engine, model_dir, tmp_path):
    prompts, reward = tmp_path / "prompts.jsonl", tmp_path / "reward.py"
    prompts.write_text("".join(f'{{"input": "What is {i} + {i}?"}}\n' for i in range(12)))
    reward.write_text(REWARD)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "quartet", "train", "ppo", "--rollout.address", engine.address),
            *("--actor.model_name_or_path", str(model_dir), "--reward.remote_url", str(reward)),
            *("--data.prompt_dataset", str(prompts), "--data.max_len", "64"),
            *("--algo.advantage.estimator", "group_norm", "--algo.kl.init_coef", "0"),
            *("--rollout.batch_size", "4", "--rollout.n_samples_per_prompt", "2"),
            *("--rollout.max_new_tokens", "8", "--ds.param_dtype", "fp32"),
            *("--train.batch_size", "8", "--train.micro_batch_size", "8"),
            *("--actor.adam.lr", "1e-3", "--run.dir", str(tmp_path / "runs"), "--run.name", "r"),
            *("--ckpt.output_dir", str(tmp_path / "out")),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "runs" / "r" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "rollout_logprob_gap" in row]
    assert len(rows) == 3
    for row in rows:
        # The engine computes with the weights that the learner pushed, and with no others.
        assert row["rollout_logprob_gap"] < 1e-4
    assert len({row["policy_version"] for row in rows}) == 3


@pytest.mark.parametrize("seed", [1, 2])
async def test_a_push_reaches_every_weight(engine, model_dir, seed):
    before = await generate(engine, temperature=0.0, max_new_tokens=16, ignore_eos=True)
    model, version = perturbed(model_dir, seed), await version_of(engine) + 1
    await push(engine, model, version)
    assert await version_of(engine) == version
    after = await generate(engine, temperature=0.0, max_new_tokens=16)
    for old, new, prompt in zip(before.groups, after.groups, PROMPTS, strict=True):
        [was], [now] = old.completions, new.completions
        assert now.token_ids.tolist() == greedy_of(model, prompt, 16)
        assert {span.policy_version for span in now.versions} == {version}
        assert was.token_ids.tolist() != now.token_ids.tolist()
    sampled = await generate(engine, samples=4, max_new_tokens=16)
    for group, prompt in zip(sampled.groups, PROMPTS, strict=True):
        for completion in group.completions:
            wanted = logprobs_of(model, prompt, completion.token_ids.tolist())
            np.testing.assert_allclose(completion.logprobs, wanted, atol=1e-4)


async def test_what_runs_goes_on_with_the_new_weights(engine, model_dir):
    """Every token's log-probability is that of the version which the completion names for it."""
    old, new = perturbed(model_dir, 3), perturbed(model_dir, 4)
    version = await version_of(engine)
    await push(engine, old, version + 1)
    running = asyncio.ensure_future(
        generate(engine, samples=2, max_new_tokens=300, ignore_eos=True)
    )
    async with RolloutClient(engine.address) as client:
        while not (await client.get_info()).completions_in_flight and not running.done():
            await asyncio.wait({running}, timeout=0.01)
        await asyncio.wait({running}, timeout=0.3)  # some tokens of the old version
        held = await client.pause(PauseMode.KEEP)
        await push(engine, new, version + 2)
        assert not running.done()
        await client.resume()
    result = await running
    assert held == 4
    models = {version + 1: old, version + 2: new}
    for group, prompt in zip(result.groups, PROMPTS, strict=True):
        for completion in group.completions:
            tokens = completion.token_ids.tolist()
            assert [s.policy_version for s in completion.versions][-1] == version + 2
            for span in completion.versions:
                wanted = logprobs_of(models[span.policy_version], prompt, tokens)
                cut = slice(span.start, span.end)
                np.testing.assert_allclose(completion.logprobs[cut], wanted[cut], atol=1e-4)
    spans = [len(c.versions) for group in result.groups for c in group.completions]
    assert max(spans) == 2, "nothing was made before the push"


async def test_an_engine_that_dies_ends_its_service(engine):
    """Whoever waits hears of it, and the process ends so that it is started again."""
    workers = psutil.Process(engine.process.pid).children(recursive=True)
    call = asyncio.ensure_future(generate(engine, max_new_tokens=400, ignore_eos=True))
    await asyncio.sleep(0.2)
    for worker in workers:
        worker.send_signal(signal.SIGKILL)
    with pytest.raises(Exception, match=r"gone|UNAVAILABLE|ENGINE|refused|closed"):
        await asyncio.wait_for(call, 60)
    assert await asyncio.to_thread(engine.process.wait, 60) == 1

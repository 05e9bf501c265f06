"""Weight pushes from this process to real rollout processes, with replicas that stop and die."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from quartet.clients import RolloutClient
from quartet.testing.tiny import TinyShape, make_tiny_model
from quartet.types import PauseMode, PromptGroup, PushBackend, ReplicaState, SamplingParams
from quartet.weights import manifest_of_model, pack_bucket, plan_buckets, push_weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# 25 million bytes in one bucket: more than the sockets hold, so that a sender has to wait.
SHAPE = TinyShape(hidden=128, intermediate=8192, layers=2)
PROMPTS = ((5, 6, 7, 8), tuple(range(20, 60)))
GROUP_TIMEOUT = 4.0
FREE_WITHIN = 2.0
"""Seconds beyond its deadline after which the sender must have its thread back."""


class Replica:
    """`quartet serve rollout` in a process of its own."""

    def __init__(self, model, folder):
        folder.mkdir()
        self.ready_file = folder / "ready.json"
        self.address = ""
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "quartet", "serve", "rollout"),
                *("--rollout.model_name_or_path", str(model), "--rollout.engine", "transformers"),
                *("--ds.param_dtype", "fp32", "--rpc.port", "0", "--rpc.die_with_parent"),
                *("--rpc.ready_file", str(self.ready_file)),
            ],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    async def serving(self):
        while not self.ready_file.exists():
            assert self.process.poll() is None, "the service ended at its start"
            await asyncio.sleep(0.05)
        self.address = json.loads(self.ready_file.read_text())["address"]
        async with RolloutClient(self.address) as client:
            await client.wait_ready(120)
        return self

    def signal(self, number):
        self.process.send_signal(number)

    def end(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of the model that is served at first, and of two that are pushed."""
    base = tmp_path_factory.mktemp("push")
    return [make_tiny_model(base / str(seed), shape=SHAPE, seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def pushed(models):
    return [AutoModelForCausalLM.from_pretrained(folder) for folder in models]


@pytest.fixture
async def replicas(models, tmp_path):
    made = [Replica(models[0], tmp_path / str(i)) for i in range(2)]
    try:
        yield await asyncio.gather(*(replica.serving() for replica in made))
    finally:
        for replica in made:
            replica.end()


class Source:
    """The buckets of a model; `before` is called with each index before it is given."""

    def __init__(self, model, manifest, before=None):
        self.model, self.manifest, self.before = model, manifest, before
        self.ended = 0

    def __call__(self):
        tensors = dict(self.model.named_parameters())
        for bucket in plan_buckets(self.manifest):
            if self.before is not None:
                self.before(bucket.index)
            yield bucket.index, pack_bucket(bucket, tensors)
        self.ended += 1


async def push(model, replicas, version, *, manifest=None, source=None, **options):
    manifest = manifest or manifest_of_model(model)
    clients = [RolloutClient(replica.address) for replica in replicas]
    try:
        return await push_weights(
            manifest=manifest,
            tensors=source or Source(model, manifest),
            replicas=clients,
            epoch=time.time_ns(),
            policy_version=version,
            **({"backend": PushBackend.GLOO, "group_timeout": GROUP_TIMEOUT} | options),
        )
    finally:
        for client in clients:
            await client.close()


async def greedy(replica, version):
    """What a replica generates, after a check that it does so with this version."""
    groups = [
        PromptGroup(group_id=str(i), prompt_token_ids=p, num_samples=1)
        for i, p in enumerate(PROMPTS)
    ]
    async with RolloutClient(replica.address) as client:
        result = await client.generate(
            request_id=f"{replica.address}-{time.time_ns()}",
            groups=groups,
            sampling=SamplingParams(temperature=0.0, max_new_tokens=16, min_new_tokens=0),
        )
        info = await client.get_info()
    assert info.policy_version == version
    assert info.state is ReplicaState.SERVING
    completions = [group.completions[0] for group in result.groups]
    assert {span.policy_version for c in completions for span in c.versions} == {version}
    return [c.token_ids.tolist() for c in completions]


def generated_by(model):
    out = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16
        )
        out.append(whole[0, len(prompt) :].tolist())
    return out


async def test_pushes_refusals_and_a_replica_that_stands_still(replicas, pushed, tmp_path):
    first, second = replicas
    assert await greedy(first, 0) == generated_by(pushed[0])

    # Two replicas, both backends: greedy tokens are those of the pushed model.
    result = await push(pushed[1], replicas, 1)
    assert [r.committed for r in result.replicas] == [True, True], result
    for replica in replicas:
        assert await greedy(replica, 1) == generated_by(pushed[1]) != generated_by(pushed[0])
    result = await push(
        pushed[2], replicas, 2, backend=PushBackend.FILE, folder=str(tmp_path / "shared")
    )
    assert [r.committed for r in result.replicas] == [True, True], result
    assert await greedy(second, 2) == generated_by(pushed[2])

    # The wrong model: refused by name, nothing changes.
    manifest = manifest_of_model(pushed[1])
    odd = replace(manifest.tensors[3], name="model.layers.0.odd.weight")
    wrong = replace(manifest, tensors=(*manifest.tensors[:3], odd, *manifest.tensors[4:]))
    result = await push(pushed[1], replicas, 3, manifest=wrong, source=lambda: feed(wrong))
    assert [r.failed_phase for r in result.replicas] == ["prepare", "prepare"]
    assert all(manifest.tensors[3].name in r.error for r in result.replicas)
    assert await greedy(first, 2) == generated_by(pushed[2])

    # A replica that stands still inside the broadcast costs the deadline and no more.
    source = Source(pushed[1], manifest, before=lambda _: second.signal(signal.SIGSTOP))
    begun = time.monotonic()
    result = await push(pushed[1], replicas, 3, source=source)
    took = time.monotonic() - begun
    assert took < GROUP_TIMEOUT + FREE_WITHIN, took
    assert source.ended == 1
    assert [r.failed_phase for r in result.replicas] == ["receive", "receive"]
    assert "bucket 0 was not taken" in result.replicas[1].error
    assert await greedy(first, 2) == generated_by(pushed[2])

    # One that stands still before it joins is left out; the other is served.
    result = await push(pushed[1], replicas, 4)
    assert [r.committed for r in result.replicas] == [True, False]
    assert result.replicas[1].failed_phase == "prepare"
    assert await greedy(first, 4) == generated_by(pushed[1])

    # It comes back with the old version, and the next push takes it along.
    second.signal(signal.SIGCONT)
    assert await greedy(second, 2) == generated_by(pushed[2])
    result = await push(pushed[2], replicas, 5)
    assert [r.committed for r in result.replicas] == [True, True], result
    assert await greedy(second, 5) == generated_by(pushed[2])


def feed(manifest):
    for bucket in plan_buckets(manifest):
        yield bucket.index, torch.zeros(bucket.numel)


async def test_a_replica_killed_inside_a_broadcast(replicas, pushed):
    """gloo would tell only at its timeout; the stream of events tells at once."""
    first, second = replicas
    manifest = manifest_of_model(pushed[1])
    loop = asyncio.get_running_loop()
    killed_at = []

    def kill():
        killed_at.append(time.monotonic())
        second.signal(signal.SIGKILL)

    def stop_then_kill(index):
        # Stopped, it cannot take the bucket: the sender is inside the broadcast when it dies.
        second.signal(signal.SIGSTOP)
        loop.call_soon_threadsafe(loop.call_later, 0.5, kill)

    source = Source(pushed[1], manifest, before=stop_then_kill)
    result = await push(pushed[1], replicas, 1, source=source, group_timeout=30.0)
    assert time.monotonic() - killed_at[0] < FREE_WITHIN
    assert source.ended == 1
    assert result.replicas[1].failed_phase == "receive"
    assert second.address in result.replicas[0].error
    assert not result.replicas[0].committed

    # The survivor serves the old version, and takes the next push although its thread of the
    # broken broadcast is still inside gloo.
    assert await greedy(first, 0) == generated_by(pushed[0])
    result = await push(pushed[1], replicas, 2)
    assert [r.committed for r in result.replicas] == [True, False]
    assert result.replicas[1].failed_phase == "prepare"
    assert await greedy(first, 2) == generated_by(pushed[1])

    # Told to end, it does, stuck thread or not.
    first.signal(signal.SIGTERM)
    assert await asyncio.to_thread(first.process.wait, 20) == 0


async def test_a_push_in_the_middle_of_completions(replicas, pushed):
    """Held, pushed to, and let go: each token is of the weights that its span names, and the keys
    and values before it are of the same."""
    prompt = PROMPTS[1]
    group = PromptGroup(group_id="g", prompt_token_ids=prompt, num_samples=2, seeds=(1, 2))
    async with RolloutClient(replicas[0].address) as client:
        asking = asyncio.create_task(
            client.generate(
                request_id="long",
                groups=[group],
                sampling=SamplingParams(max_new_tokens=80, ignore_eos=True),
            )
        )
        while (await client.get_info()).completions_in_flight < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        # Sampled in the same steps as the others: they have a token when this one has.
        await client.generate(
            request_id="short",
            groups=[replace(group, group_id="s")],
            sampling=SamplingParams(max_new_tokens=1),
        )
        assert await client.pause(PauseMode.KEEP) == 2
        result = await push(pushed[1], replicas, 1)
        assert [replica.committed for replica in result.replicas] == [True, True]
        assert not asking.done()
        await client.resume()
        completions = (await asking).groups[0].completions
    for completion in completions:
        tokens = [*prompt, *completion.token_ids.tolist()]
        assert [span.policy_version for span in completion.versions] == [0, 1]
        for span in completion.versions:
            with torch.no_grad():
                logits = pushed[span.policy_version](torch.tensor([tokens])).logits[0]
            wanted = logits.log_softmax(-1)
            for place in range(span.start, span.end):
                at = len(prompt) + place
                assert abs(completion.logprobs[place] - float(wanted[at - 1, tokens[at]])) < 1e-4

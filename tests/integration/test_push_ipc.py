"""Pushes by ipc to real rollout processes: of equal weights, with replicas and senders that die."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest
from transformers import AutoModelForCausalLM

from quartet.testing.tiny import make_tiny_model
from quartet.types import PushBackend
from quartet.weights import manifest_of_model
from tests.integration.test_weight_push import (
    SHAPE,
    Replica,
    Source,
    generated_by,
    greedy,
    push,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GROUP_TIMEOUT = 10.0

SENDER = """
import asyncio, sys, time
from transformers import AutoModelForCausalLM
from quartet.clients import RolloutClient
from quartet.types import PushBackend
from quartet.weights import manifest_of_model, pack_bucket, plan_buckets, push_weights

folder, version, *addresses = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder)
manifest = manifest_of_model(model, bucket_bytes=4 << 20)

def source():
    tensors = dict(model.named_parameters())
    for bucket in plan_buckets(manifest):
        if bucket.index == 2:
            print("writing", flush=True)
            time.sleep(600)
        yield bucket.index, pack_bucket(bucket, tensors)

async def main():
    await push_weights(
        manifest=manifest, tensors=source, replicas=[RolloutClient(a) for a in addresses],
        epoch=time.time_ns(), policy_version=int(version), backend=PushBackend.IPC, device="cpu",
    )

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    base = tmp_path_factory.mktemp("ipc")
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


async def push_by_ipc(model, replicas, version, **options):
    options = {"group_timeout": GROUP_TIMEOUT, "device": "cpu"} | options
    manifest = manifest_of_model(model, bucket_bytes=4 << 20)
    return await push(
        model, replicas, version, manifest=manifest, backend=PushBackend.IPC, **options
    )


def memory_of(pid):
    """What of a push a process has open or mapped."""
    links = []
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            links.append(os.readlink(entry.path))
        except FileNotFoundError:
            continue
    with open(f"/proc/{pid}/maps") as file:
        links += file.read().splitlines()
    return [link for link in links if "quartet-push" in link]


def named_memory():
    """What anybody of Quartet has left in /dev/shm."""
    return [name for name in os.listdir("/dev/shm") if "quartet-push" in name]


async def let_go(*replicas):
    for replica in replicas:
        while memory_of(replica.process.pid):  # noqa: ASYNC110 - it says nothing to this loop
            await asyncio.sleep(0.05)


async def test_pushes_a_dead_replica_and_one_that_stands_still(replicas, pushed):
    first, second = replicas
    result = await push_by_ipc(pushed[1], replicas, 1)
    assert [r.committed for r in result.replicas] == [True, True], result
    for replica in replicas:
        assert await greedy(replica, 1) == generated_by(pushed[1]) != generated_by(pushed[0])
    await let_go(first, second)

    # One that stands still while it reads costs its deadline, and no other the push.
    manifest = manifest_of_model(pushed[2], bucket_bytes=4 << 20)
    stop = Source(pushed[2], manifest, before=lambda i: i or second.signal(signal.SIGSTOP))
    result = await push_by_ipc(pushed[2], replicas, 2, source=stop)
    assert [r.committed for r in result.replicas] == [True, False], result
    assert result.replicas[1].failed_phase == "receive"
    assert stop.ended == 1
    assert await greedy(first, 2) == generated_by(pushed[2])
    second.signal(signal.SIGCONT)
    assert await greedy(second, 1) == generated_by(pushed[1])
    result = await push_by_ipc(pushed[2], replicas, 3)
    assert [r.committed for r in result.replicas] == [True, True], result
    assert await greedy(second, 3) == generated_by(pushed[2])

    # One that is killed is named, and the other gets the push.
    kill = Source(pushed[1], manifest, before=lambda i: i or second.signal(signal.SIGKILL))
    result = await push_by_ipc(pushed[1], replicas, 4, source=kill)
    assert [r.committed for r in result.replicas] == [True, False], result
    assert result.replicas[1].failed_phase == "receive"
    assert await greedy(first, 4) == generated_by(pushed[1])
    await let_go(first)
    assert not memory_of(os.getpid())
    assert not named_memory()


async def test_a_sender_killed_while_it_writes(replicas, pushed, models):
    addresses = [replica.address for replica in replicas]
    sender = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SENDER, str(models[1]), "1", *addresses),
        stdout=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert (await sender.stdout.readline()).strip() == b"writing"
    assert memory_of(replicas[0].process.pid)
    sender.kill()
    await sender.wait()
    await let_go(*replicas)
    assert not named_memory()
    for replica in replicas:
        assert await greedy(replica, 0) == generated_by(pushed[0])
    result = await push_by_ipc(pushed[2], replicas, 1)
    assert [r.committed for r in result.replicas] == [True, True], result
    assert await greedy(replicas[1], 1) == generated_by(pushed[2])

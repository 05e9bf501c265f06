"""Pushes through shared memory: what is read, who is refused, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from quartet.errors import InfraError, RequestError
from quartet.testing.push import CountingSource, LocalReplica, make_manifest, make_tensors
from quartet.types import IpcSegment, PushBackend, ReceiveEvent, Rendezvous
from quartet.types.requests import PrepareWeightsRequest
from quartet.weights import ipc, pack_bucket, plan_buckets, push_weights
from quartet.weights import landing as landing_module
from quartet.weights.tensors import empty_bucket


async def push(replicas, *, source=None, manifest=None, epoch=100, **options):
    manifest = manifest or make_manifest()
    options = {"group_timeout": 3.0, "policy_version": 7, "device": "cpu"} | options
    return await push_weights(
        manifest=manifest,
        tensors=source or CountingSource(manifest, make_tensors()),
        replicas=replicas,
        epoch=epoch,
        backend=PushBackend.IPC,
        **options,
    )


@pytest.fixture
def three():
    made = [LocalReplica(f"127.0.0.1:{i}") for i in (1, 2, 3)]
    yield made
    for replica in made:
        replica.inbox.close()


def memory_files():
    """Files in memory that this process has open: descriptors, and what is mapped."""
    fds = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if _is_there(entry)]
    with open("/proc/self/maps") as file:
        maps = [line for line in file if "quartet-push" in line]
    return [name for name in fds if "quartet-push" in name] + maps


def _is_there(entry):
    try:
        return bool(os.readlink(entry.path))
    except OSError:
        return False


async def closed():
    """Until the threads that read have let go."""
    while memory_files():  # noqa: ASYNC110 - threads say nothing to this loop
        await asyncio.sleep(0.01)


async def test_all_replicas_get_every_byte_and_nothing_is_left(three):
    result = await push(three)
    assert [r.committed for r in result.replicas] == [True] * 3, result
    assert all(r.has(make_tensors()) and r.version == 7 for r in three)
    assert all(r.calls == ["prepare", "receive", "commit"] for r in three)
    assert result.num_buckets == len(plan_buckets(make_manifest())) > 2
    assert len(result.digest) == 32
    await closed()


async def test_the_digest_is_that_of_a_broadcast(replica):
    by_memory = await push([replica])
    by_gloo = await push_weights(
        manifest=make_manifest(),
        tensors=CountingSource(make_manifest(), make_tensors()),
        replicas=[replica],
        epoch=101,
        policy_version=8,
        backend=PushBackend.GLOO,
        group_timeout=3.0,
    )
    assert by_memory.digest == by_gloo.digest != ""


async def test_a_damaged_byte_is_seen(three, monkeypatch):
    send = ipc.IpcTransport.send

    def damage(self, bucket, flat):
        send(self, bucket, flat)
        if bucket.index == 1:
            self.flat(bucket)[-1] += 1

    monkeypatch.setattr(ipc.IpcTransport, "send", damage)
    result = await push(three[:1])
    assert result.replicas[0].failed_phase == "receive"
    assert "digest of bucket 1 differs" in result.replicas[0].error
    assert three[0].version == 0


async def test_the_loss_of_one_concerns_no_other(three):
    async def gone():
        raise InfraError("gone")

    def fail(event):
        return ReceiveEvent(event="failed", error="no") if event.event == "done" else event

    three[0].before["prepare"] = gone
    three[1].on_event = fail
    result = await push(three)
    assert [r.failed_phase for r in result.replicas] == ["prepare", "receive", ""]
    assert [r.committed for r in result.replicas] == [False, False, True]
    await closed()


async def test_one_that_stands_still_costs_the_deadline_and_no_other(three):
    forever = asyncio.Event()
    three[0].before["receive"] = forever.wait
    result = await push(three, group_timeout=5.0)
    assert [r.committed for r in result.replicas] == [False, True, True]
    assert "bucket 0 was not read in 5 s" in result.replicas[0].error
    assert three[0].calls == ["prepare", "receive", "abort"]
    await closed()


async def test_nothing_is_written_when_all_refuse(replica):
    manifest = make_manifest(extra=(3,))
    tensors = make_tensors() | {"extra": torch.zeros(3)}
    source = CountingSource(manifest, tensors)
    result = await push([replica], manifest=manifest, source=source)
    assert result.replicas[0].failed_phase == "prepare"
    assert "extra" in result.replicas[0].error
    assert source.ended == 1  # every item is a gather of all the learner's ranks
    assert result.total_bytes == 0
    await closed()


async def test_a_source_that_fails_leaves_the_old_version_and_nothing_else(three):
    def source():
        yield 0, pack_bucket(plan_buckets(make_manifest())[0], make_tensors())
        raise ValueError("not finite")

    with pytest.raises(ValueError, match="not finite"):
        await push(three, source=source)
    assert all(r.calls == ["prepare", "abort"] and r.version == 0 for r in three)
    await closed()


def handle_of(manifest, **changes):
    segment = ipc.make_segment(plan_buckets(manifest), "cpu")
    return segment, replace(segment.handle, **changes)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"machine": "another"}, "another machine"),
        ({"process_id": 2**22 + 1}, "cannot be opened"),
        ({"inode": 1}, "not the sender's memory"),
        ({"gpu_uuid": "GPU-1", "cuda_handle": bytes(64)}, "not among the 0"),
    ],
)
def test_memory_out_of_reach_is_refused_with_a_remedy(changes, why):
    segment, handle = handle_of(make_manifest(), **changes)
    with pytest.raises(RequestError, match=why) as caught:
        ipc.open_segment(handle, handle.size_bytes)
    assert caught.value.info.reason == "WEIGHTS_IPC_OUT_OF_REACH"
    assert "--push.backend" in caught.value.info.remedy
    segment.close()


def test_memory_that_is_too_small_is_refused():
    segment, handle = handle_of(make_manifest())
    with pytest.raises(RequestError, match="needs"):
        ipc.open_segment(handle, handle.size_bytes + 1)
    segment.close()


async def test_a_replica_that_cannot_see_the_memory_refuses_at_prepare(three, monkeypatch):
    seen = iter(["here", "here", "elsewhere", "here"])  # the sender's, then each replica's
    monkeypatch.setattr(ipc, "machine_name", lambda: next(seen))
    result = await push(three)
    assert sorted(r.failed_phase for r in result.replicas) == ["", "", "prepare"]
    [refused] = [r for r in result.replicas if r.failed_phase]
    assert "another machine" in refused.error
    assert "start this replica on the sender's machine" in refused.error


def test_buckets_begin_where_the_wire_says():
    manifest = make_manifest(bucket_bytes=64)
    buckets = plan_buckets(manifest)
    starts, size = ipc.segment_layout(buckets)
    assert all(start % 256 == 0 for start in starts)
    ends = [s + b.nbytes for s, b in zip(starts, buckets, strict=True)]
    assert all(end <= start < end + 256 for end, start in zip(ends, starts[1:], strict=False))
    assert size == ends[-1]


def test_what_a_replica_writes_nobody_else_sees():
    buckets = plan_buckets(make_manifest())
    segment = ipc.make_segment(buckets, "cpu")
    sender = ipc.IpcTransport(segment, buckets)
    flat = pack_bucket(buckets[0], make_tensors())
    sender.send(buckets[0], flat)
    ours = ipc.IpcTransport(ipc.open_segment(segment.handle, 1), buckets)
    ours.flat(buckets[0]).zero_()
    other = ipc.IpcTransport(ipc.open_segment(segment.handle, 1), buckets)
    copy = empty_bucket(buckets[0])
    other.receive(buckets[0], copy)
    assert torch.equal(copy, flat)
    for end in (sender, ours, other):
        end.close()


HOLDER = """
import sys
from quartet.testing.push import make_manifest
from quartet.weights import ipc, plan_buckets
segment = ipc.make_segment(plan_buckets(make_manifest()), "cpu")
segment.bytes().fill_(3)
h = segment.handle
print(h.machine, h.size_bytes, h.process_id, h.descriptor, h.inode, flush=True)
sys.stdin.read()
"""


def hold():
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def handle_from(holder):
    machine, *numbers = holder.stdout.readline().split()
    names = ("size_bytes", "process_id", "descriptor", "inode")
    return IpcSegment(machine=machine, **dict(zip(names, map(int, numbers), strict=True)))


def test_a_killed_sender_leaves_no_memory_but_what_is_being_read():
    with hold() as holder:
        handle = handle_from(holder)
        opened = ipc.open_segment(handle, handle.size_bytes)
        holder.kill()
        holder.wait()
    assert not [name for name in os.listdir("/dev/shm") if "quartet-push" in name]
    assert opened.bytes().eq(3).all()  # a swap that has begun goes on to its end
    with pytest.raises(RequestError, match="cannot be opened"):
        ipc.open_segment(handle, handle.size_bytes)
    opened.close()
    assert not memory_files()


class Block:
    """A segment that the sender's end would take away from its readers, as a GPU's."""

    freed_by_others = False

    def __init__(self):
        self.closed = 0

    def close(self):
        self.closed += 1


def test_a_gpus_memory_stays_until_its_readers_are_done():
    retained, block = ipc.Retained(), Block()
    retained.hold(block, {"a", "b"})
    retained.release(asked={"a", "b", "c"}, answered={"a", "c"})
    assert (block.closed, len(retained)) == (0, 1)  # b stands still
    retained.release(asked={"b"}, answered={"b"})
    assert (block.closed, len(retained)) == (1, 0)


def test_a_reader_that_is_no_replica_any_more_holds_nothing():
    retained, block = ipc.Retained(), Block()
    retained.hold(block, {"a"})
    retained.release(asked={"b"}, answered=set())
    assert block.closed == 1
    done = Block()
    retained.hold(done, set())
    assert done.closed == 1


async def test_the_next_push_frees_what_a_silent_replica_held(three, monkeypatch):
    made = []

    class Taken(ipc.HostSegment):
        def __init__(self, size):
            super().__init__(size)
            self.freed_by_others = False
            made.append(self)

    monkeypatch.setattr(ipc, "HostSegment", Taken)
    forever = asyncio.Event()
    three[0].before["receive"] = forever.wait
    await push(three, group_timeout=5.0)
    assert not made[0]._file.closed
    del three[0].before["receive"]
    result = await push(three, epoch=200)
    assert all(r.committed for r in result.replicas), result
    assert [segment._file.closed for segment in made] == [True, True]


async def test_memory_other_than_the_senders_can_be_filled_from_it(replica):
    """An engine that stages elsewhere, as one whose workers map memory of its own."""

    def copied(request):
        return landing_module.OwnLanding(request, "cpu", landing_module.OwnStaging())

    replica.inbox._land = copied
    result = await push([replica])
    assert result.replicas[0].committed, result
    assert replica.has(make_tensors())
    await closed()


async def test_a_replica_lets_go_when_the_sender_dies(replica):
    """Between its calls a sender has no stream open, which would tell of its death."""
    with hold() as holder:
        handle = handle_from(holder)
        request = PrepareWeightsRequest(
            request_id="r",
            epoch=5,
            policy_version=1,
            manifest=make_manifest(),
            backend=PushBackend.IPC,
            rendezvous=Rendezvous(ipc=handle),
            rank=1,
            world_size=2,
            group_timeout=3.0,
        )
        await replica.inbox.prepare(request)
        assert memory_files()
        holder.kill()
        await closed()
    result = await push([replica])
    assert result.replicas[0].committed, result

"""Workers as members of a push: real sockets, threads and gloo groups, without vLLM."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from quartet_rollout.engines.vllm import channel, crew, receiver
from quartet_rollout.engines.vllm.channel import AskRoom, Hello, Join, Joined, Room
from quartet_rollout.engines.vllm.crew import InWorkers, assemble
from quartet_rollout.engines.vllm.receiver import WorkerReceiver

from quartet.errors import InfraError, RequestError
from quartet.testing.push import CountingSource, LocalReplica, make_manifest, make_tensors
from quartet.types import PrepareWeightsRequest, PushBackend, Rendezvous
from quartet.weights import WeightInbox, landing, push_weights


class WorkersReplica(LocalReplica):
    """A replica whose weights lie in workers; here they are threads of this process."""

    def __init__(self, address, its_crew, workers):
        super().__init__(address)
        self.num_ranks = its_crew.size
        self.workers = workers
        self.inbox = WeightInbox(wanted=make_manifest, replica=address, landing=its_crew.landing)
        self.loaded = []

    async def _load(self, tensors, version):
        assert isinstance(tensors, InWorkers)
        assert list(tensors) == []
        held = [worker.tensors(tensors.epoch) for worker in self.workers]
        self.loaded = [{name: t.clone() for name, t in one} for one in held]
        self.version = version
        return 0

    def has(self, tensors):
        return len(self.loaded) == len(self.workers) and all(
            one.keys() == tensors.keys() and all(torch.equal(one[n], t) for n, t in tensors.items())
            for one in self.loaded
        )


async def start(size):
    workers = []

    async def tell(path):
        workers.extend(WorkerReceiver(path, rank=rank, device="cpu") for rank in range(size))

    return await assemble(size, tell, backends={PushBackend.GLOO, PushBackend.IPC}), workers


@pytest.fixture
async def two():
    its_crew, workers = await start(2)
    yield WorkersReplica("127.0.0.1:1", its_crew, workers)
    its_crew.close()


async def push(replicas, *, epoch=100, version=1, seed=0, backend=PushBackend.GLOO, **rest):
    tensors = make_tensors(seed)
    result = await push_weights(
        manifest=make_manifest(),
        tensors=CountingSource(make_manifest(), tensors),
        replicas=replicas,
        epoch=epoch,
        policy_version=version,
        backend=backend,
        device="cpu",
        **({"group_timeout": 20.0} | rest),
    )
    return result, tensors


@pytest.mark.parametrize("backend", [PushBackend.GLOO, PushBackend.IPC])
@pytest.mark.parametrize("size", [1, 2, 3])
async def test_every_worker_gets_all_of_every_push(size, backend):
    its_crew, workers = await start(size)
    replica, plain = WorkersReplica("127.0.0.1:1", its_crew, workers), LocalReplica("127.0.0.1:2")
    try:
        for number in (1, 2):
            result, tensors = await push(
                [replica, plain],
                epoch=100 * number,
                version=number,
                seed=number,
                backend=backend,
            )
            assert [r.error for r in result.replicas] == ["", ""]
            assert replica.has(tensors)
            # Behind the workers in the group.
            assert plain.has(tensors)
        with pytest.raises(InfraError, match="no push of epoch 200"):
            await settled(lambda: workers[0].tensors(200))
    finally:
        its_crew.close()


async def settled(look, seconds=10.0):
    """Ask until it raises: orders reach the workers a moment later."""
    async with asyncio.timeout(seconds):
        while True:
            look()
            await asyncio.sleep(0.01)


def shared_memories():
    held = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return [path for path in held if "quartet-weights" in path]


def is_there(path):
    return Path(path).exists()


async def test_bytes_that_one_worker_cannot_use_concern_no_other_replica(two, monkeypatch):
    plain = LocalReplica("127.0.0.1:2")
    real, seen = receiver.OwnLanding.digest, []

    async def fails_once(self, bucket):
        if bucket.index == 1 and not seen:
            seen.append(bucket)
            raise RuntimeError("out of memory")
        return await real(self, bucket)

    monkeypatch.setattr(receiver.OwnLanding, "digest", fails_once)
    result, tensors = await push([two, plain], epoch=100)
    assert seen
    first, second = result.replicas
    if first.committed:  # the plain replica's own landing came first
        first, second = second, first
    assert first.failed_phase == "receive"
    assert "out of memory" in first.error
    assert second.committed
    monkeypatch.undo()
    result, tensors = await push([two, plain], epoch=200, version=2, seed=5)
    assert [r.committed for r in result.replicas] == [True, True]
    assert two.has(tensors)


async def test_workers_with_different_bytes_refuse_them(two, monkeypatch):
    real, count = landing.bucket_digest, []

    def differs(flat):
        count.append(1)
        return "00" * 16 if len(count) == 1 else real(flat)

    monkeypatch.setattr(landing, "bucket_digest", differs)
    result, _ = await push([two])
    assert "different bytes of bucket 0" in result.replicas[0].error
    assert two.loaded == []


async def test_an_aborted_push_leaves_nothing_behind(two):
    def gone(event):
        if event.event == "bucket":
            raise InfraError("stream reset")
        return event

    two.on_event = gone
    result, _ = await push([two], group_timeout=3.0)
    assert result.replicas[0].error == "stream reset"
    assert two.loaded == []
    two.on_event = lambda event: event
    result, tensors = await push([two], epoch=200, version=2, seed=3)
    assert result.replicas[0].committed, result
    assert two.has(tensors)
    assert shared_memories() == []


async def test_a_sender_that_lays_out_too_few_ranks_is_told(two):
    two.num_ranks = 1
    result, _ = await push([two])
    assert result.replicas[0].failed_phase == "prepare"
    assert "takes 2 ranks from 1 on" in result.replicas[0].error


class ScriptedWorker:
    """The other end of a worker's socket."""

    def __init__(self, free_bytes=0):
        self.free_bytes = free_bytes
        self.joins = []
        self.dies_at_join = False

    async def serve(self, path, rank):
        reader, writer = await asyncio.open_unix_connection(path)
        channel.write(writer, Hello(rank=rank))
        while (order := await channel.read(reader)) is not None:
            if isinstance(order, AskRoom):
                channel.write(writer, Room(epoch=order.epoch, free_bytes=self.free_bytes))
            elif isinstance(order, Join):
                self.joins.append(order)
                if self.dies_at_join:
                    break
                channel.write(writer, Joined(epoch=order.epoch))
        writer.close()


async def scripted(*workers):
    running = []

    async def tell(path):
        running.extend(asyncio.ensure_future(w.serve(path, r)) for r, w in enumerate(workers))

    its_crew = await assemble(len(workers), tell, backends={PushBackend.NCCL})
    return its_crew, running


def request(backend=PushBackend.NCCL):
    return PrepareWeightsRequest(
        request_id="r",
        epoch=7,
        policy_version=1,
        manifest=make_manifest(),
        backend=backend,
        rendezvous=Rendezvous(store_address="127.0.0.1:1", group_name="g"),
        rank=3,
        world_size=5,
        group_timeout=5.0,
    )


@pytest.mark.parametrize(("free", "shared"), [((8 << 30, 8 << 30), False), ((8 << 30, 9), True)])
async def test_workers_stage_on_their_gpus_where_all_have_room(free, shared):
    workers = [ScriptedWorker(f) for f in free]
    its_crew, running = await scripted(*workers)
    there = its_crew.landing(request())
    await there.join()
    [first], [second] = (w.joins for w in workers)
    assert [first.request.rank, second.request.rank] == [3, 4]
    assert first.shared_path == second.shared_path
    assert bool(first.shared_path) is shared
    assert not shared or is_there(first.shared_path)
    there.close(abort=False)
    assert shared_memories() == []
    its_crew.close()
    await asyncio.gather(*running)


async def test_the_death_of_a_worker_is_known_at_once():
    workers = [ScriptedWorker(8 << 30), ScriptedWorker(8 << 30)]
    workers[1].dies_at_join = True
    its_crew, running = await scripted(*workers)
    there = its_crew.landing(replace(request(), group_timeout=600.0))
    with pytest.raises(InfraError, match="worker 1 of vLLM is gone"):
        # Worker 0 has joined, and the other never will.
        async with asyncio.timeout(60):
            await there.join()
    with pytest.raises(InfraError, match="gone"):
        await its_crew.landing(request()).join()
    async with asyncio.timeout(60):
        assert (await its_crew.broken()).info.reason == "ENGINE_DEAD"
    its_crew.close()
    await asyncio.gather(*running)


async def test_hanging_up_is_no_death():
    its_crew, running = await scripted(ScriptedWorker())
    its_crew.close()
    await asyncio.gather(*running)
    while its_crew._writers:  # noqa: ASYNC110 - its task ends in the next steps of the loop
        await asyncio.sleep(0)
    assert not its_crew.is_broken


async def test_workers_that_do_not_come_are_an_error(monkeypatch):
    monkeypatch.setattr(crew, "CONNECT_SECONDS", 0.05)

    async def nobody(path):
        assert is_there(path)

    with pytest.raises(InfraError, match="did not connect"):
        await assemble(1, nobody, backends=set())


async def test_memory_for_all_workers_is_refused_where_there_is_none(two, monkeypatch):
    monkeypatch.setattr(landing, "free_bytes", lambda device: 10)
    result, _ = await push([two])
    assert "no room" in result.replicas[0].error
    with pytest.raises(RequestError, match="takes 2 ranks"):
        landing.check_room(replace(request(), rank=4), two.inbox._land(request()))

"""A push over real gloo and real files, with everything that can go wrong in each phase."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from quartet.errors import ConfigError, FatalError, InfraError, RequestError, StateError
from quartet.testing.push import CountingSource, LocalReplica, make_manifest, make_tensors
from quartet.types import PushBackend
from quartet.types.requests import AbortWeightsRequest, CommitWeightsRequest
from quartet.weights import digest as digest_module
from quartet.weights import landing, plan_buckets, push_weights, receive, total_bytes


async def push(replicas, *, source=None, manifest=None, epoch=100, **options):
    manifest = manifest or make_manifest()
    options = {"backend": PushBackend.GLOO, "group_timeout": 3.0, "policy_version": 7} | options
    return await push_weights(
        manifest=manifest,
        tensors=source or CountingSource(manifest, make_tensors()),
        replicas=replicas,
        epoch=epoch,
        **options,
    )


@pytest.fixture
def three():
    made = [LocalReplica(f"127.0.0.1:{i}") for i in (1, 2, 3)]
    yield made
    for replica in made:
        replica.inbox.close()


async def test_all_replicas_get_every_byte(three):
    result = await push(three)
    assert [r.committed for r in result.replicas] == [True] * 3
    assert [r.replica for r in result.replicas] == [f"replica 127.0.0.1:{i}" for i in (1, 2, 3)]
    assert all(r.has(make_tensors()) and r.version == 7 for r in three)
    assert result.total_bytes == total_bytes(make_manifest())
    assert result.num_buckets == len(plan_buckets(make_manifest())) > 2
    assert len(result.digest) == 32
    assert not any("abort" in r.calls for r in three)


async def test_pushes_follow_one_another(replica):
    for seed in (1, 2, 3):
        source = CountingSource(make_manifest(), make_tensors(seed))
        await push([replica], source=source, epoch=seed, policy_version=seed)
        assert replica.has(make_tensors(seed))
        assert replica.version == seed


async def test_four_calls_whatever_the_number_of_tensors(replica):
    await push([replica])
    assert replica.calls == ["prepare", "receive", "commit"]


async def test_files_carry_the_same_and_leave_nothing(replica, tmp_path):
    result = await push([replica], backend=PushBackend.FILE, folder=str(tmp_path / "push"))
    assert result.replicas[0].committed, result.replicas[0].error
    assert replica.has(make_tensors())
    assert list((tmp_path / "push").iterdir()) == []


async def test_a_damaged_file_is_seen(three, tmp_path):
    async def damage():
        path = next(tmp_path.glob("*/bucket-00001.safetensors"))
        path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\1")

    three[0].before["receive"] = damage
    result = await push(three[:1], backend=PushBackend.FILE, folder=str(tmp_path))
    assert result.replicas[0].failed_phase == "receive"
    assert "digest of bucket 1 differs" in result.replicas[0].error
    assert three[0].version == 0


async def test_the_loss_of_one_file_reader_concerns_no_other(three, tmp_path):
    async def die():
        raise InfraError("connection lost")

    three[1].before["receive"] = die
    result = await push(three, backend=PushBackend.FILE, folder=str(tmp_path))
    assert [r.committed for r in result.replicas] == [True, False, True]
    assert "connection lost" in result.replicas[1].error


async def test_a_replica_that_refuses_is_named_and_left_out(three):
    three[1].inbox = receive.WeightInbox(wanted=lambda: make_manifest(a=(8, 9)))
    begun = time.monotonic()
    result = await push(three)
    assert time.monotonic() - begun < 2.5  # a refusal does not cost the group's timeout
    assert [r.committed for r in result.replicas] == [True, False, True]
    assert result.replicas[1].failed_phase == "prepare"
    assert "a has shape [8, 8] in the push and [8, 9] here" in result.replicas[1].error
    assert three[0].has(make_tensors())


async def test_a_replica_that_is_not_there_is_left_out(three):
    async def gone():
        raise InfraError("connection refused")

    three[0].before["prepare"] = gone
    result = await push(three)
    assert [r.committed for r in result.replicas] == [False, True, True]
    assert result.replicas[0].error == "connection refused"


async def test_a_replica_that_does_not_say_how_many_ranks_it_takes_is_left_out(three):
    async def refused(*, timeout=None):
        raise InfraError("connection refused")

    three[1].get_info = refused
    result = await push(three)
    assert [r.committed for r in result.replicas] == [True, False, True]
    assert result.replicas[1].failed_phase == "prepare"
    assert result.replicas[1].error == "connection refused"
    assert "prepare" not in three[1].calls


async def test_a_replica_that_is_late_is_left_out_and_those_who_wait_are_not_blamed(three):
    three[2].before["prepare"] = asyncio.Event().wait
    begun = time.monotonic()
    result = await push(three, group_timeout=1.0)
    assert time.monotonic() - begun < 1.0 + 2.0 + 1.0
    assert [r.committed for r in result.replicas] == [True, True, False]
    assert result.replicas[2].failed_phase == "prepare"
    assert "did not join" in result.replicas[2].error


async def test_a_replica_that_joins_and_does_not_say_so_is_blamed_alone(three):
    joins = three[1].inbox.prepare

    async def in_silence(request):
        await joins(request)
        await asyncio.Event().wait()

    three[1].inbox.prepare = in_silence
    result = await push(three, group_timeout=1.0)
    assert [r.committed for r in result.replicas] == [True, False, True]
    assert result.replicas[1].failed_phase == "prepare"
    assert "no answer within 1 s" in result.replicas[1].error


async def test_a_replica_that_hears_nothing_does_not_hold_up_the_others(three):
    """The others' push goes on while the call that tells it of the end is still under way."""
    telling, told = [], asyncio.Event()

    async def tell():
        telling.append(told)
        await told.wait()

    async def commit():
        assert telling
        told.set()

    three[2].before |= {"prepare": asyncio.Event().wait, "abort": tell}
    three[0].before["commit"] = commit
    result = await push(three, group_timeout=1.0)
    assert [r.committed for r in result.replicas] == [True, True, False]
    assert told.is_set()


async def test_a_push_of_the_same_epoch_is_refused_and_does_not_end_the_first(three):
    second = []

    async def push_again():
        second.append(await push(three, policy_version=8))

    three[0].before["commit"] = push_again
    result = await push(three)
    assert [r.committed for r in result.replicas] == [True] * 3
    assert [r.version for r in three] == [7] * 3
    assert [r.failed_phase for r in second[0].replicas] == ["prepare"] * 3
    # The others have committed, and know that epoch too.
    assert all("is not newer than" in r.error for r in second[0].replicas)


async def test_a_replica_that_never_gets_ready_is_left_out(three):
    three[0].before["receive"] = asyncio.Event().wait
    result = await push(three, group_timeout=1.0)
    assert [r.committed for r in result.replicas] == [False, True, True]
    assert result.replicas[0].failed_phase == "receive"
    assert "READY" in result.replicas[0].error


async def test_nobody_left_still_drains_the_source(replica):
    replica.inbox = receive.WeightInbox(wanted=lambda: make_manifest(a=(8, 9)))
    source = CountingSource(make_manifest(), make_tensors())
    result = await push([replica], source=source)
    assert source.ended == 1
    assert not result.replicas[0].committed
    assert (result.total_bytes, result.digest) == (0, "")


async def test_a_death_in_the_middle_frees_the_sender_at_once(three):
    """The stream of events tells; the gloo thread is left behind until its timeout."""

    def die_after_one(event):
        if event.event == "bucket":
            raise InfraError("stream reset")
        return event

    three[1].on_event = die_after_one
    three[1].inbox._receive_buckets = one_bucket_then_nothing(three[1].inbox)
    source = CountingSource(make_manifest(), make_tensors())
    begun = time.monotonic()
    result = await push(three, source=source, group_timeout=20.0)
    assert time.monotonic() - begun < 4.0
    assert source.ended == 1
    assert result.replicas[1].failed_phase == "receive"
    assert result.replicas[1].error == "stream reset"
    assert "127.0.0.1:2: stream reset" in result.replicas[0].error
    assert [r.version for r in three] == [0, 0, 0]
    assert all("abort" in r.calls for r in three)


def one_bucket_then_nothing(inbox):
    whole = inbox._receive_buckets

    async def part(push):
        async for event in whole(push):
            yield event
            return

    return part


async def test_a_member_that_hangs_costs_the_timeout_and_no_more(replica):
    async def hang(push):
        await asyncio.Event().wait()
        yield

    replica.inbox._receive_buckets = hang
    # Larger than what the sockets hold: the sender has to wait for its peer.
    manifest, tensors = wide()
    replica.inbox._wanted = lambda: manifest
    source = CountingSource(manifest, tensors)
    begun = time.monotonic()
    result = await push([replica], source=source, manifest=manifest, group_timeout=1.0)
    assert 0.9 < time.monotonic() - begun < 1.0 + 2.0
    assert source.ended == 1
    assert result.replicas[0].failed_phase == "receive"
    assert "bucket 0" in result.replicas[0].error


def wide():
    spec = make_manifest().tensors[0]
    size = 8 << 20
    manifest = replace(make_manifest(), tensors=(replace(spec, shape=(size,)),), aliases={})
    return manifest, {spec.name: torch.ones(size)}


async def test_an_error_of_one_receiver_leaves_the_others_whole(three, monkeypatch):
    """It keeps reading, reports FAILED at the end, and everybody else commits."""
    real = digest_module.bucket_digest
    broken_worker = "quartet-digest-100"
    seen = []

    def fails_once(flat):
        import threading

        if threading.current_thread().name == broken_worker and not seen:
            seen.append(flat)
            raise RuntimeError("out of memory")
        return real(flat)

    monkeypatch.setattr(landing, "bucket_digest", fails_once)
    result = await push(three)
    committed = [r.committed for r in result.replicas]
    assert sorted(committed) == [False, True, True]
    (failed,) = [r for r in result.replicas if not r.committed]
    assert failed.failed_phase == "receive"
    assert "out of memory" in failed.error


async def test_a_wrong_digest_is_named_and_nothing_swaps(replica):
    def lie(event):
        return replace(event, digest="00" * 16) if event.event == "bucket" else event

    replica.on_event = lie
    result = await push([replica])
    assert "digest of bucket 0 differs" in result.replicas[0].error
    assert replica.version == 0


async def test_the_receiver_refuses_to_commit_other_bytes(replica):
    async def other_request(request, *, timeout=None):
        return await commit(replace(request, digest="00" * 16), timeout=timeout)

    commit = replica.commit_weights
    replica.commit_weights = other_request
    result = await push([replica])
    assert result.replicas[0].failed_phase == "commit"
    assert "digest" in result.replicas[0].error
    assert replica.version == 0
    assert not replica.inbox.busy


async def test_a_failing_swap_is_named_commit(replica):
    async def boom():
        raise FatalError("the engine died")

    replica.before["commit"] = boom
    result = await push([replica])
    assert (result.replicas[0].failed_phase, result.replicas[0].error) == (
        "commit",
        "the engine died",
    )


async def test_a_replica_that_stands_still_at_its_commit_costs_the_timeout_and_no_more(three):
    three[0].before["commit"] = asyncio.Event().wait
    result = await push(three, commit_timeout=0.5)
    assert [r.committed for r in result.replicas] == [False, True, True]
    assert result.replicas[0].failed_phase == "commit"
    assert result.replicas[0].error == "no answer within 0.5 s"


async def test_a_failing_source_aborts_and_raises(replica):
    def source():
        yield 0, torch.zeros(plan_buckets(make_manifest())[0].numel)
        raise FatalError("gather failed")

    with pytest.raises(FatalError, match="gather failed"):
        await push([replica], source=source)
    assert "abort" in replica.calls
    assert replica.version == 0


@pytest.mark.parametrize(
    "items", [[], [(1, torch.zeros(3))], [(0, torch.zeros(3))]], ids=["few", "order", "size"]
)
async def test_a_source_that_leaves_the_plan_is_an_error(replica, items):
    with pytest.raises(FatalError, match=r"the source gave|the plan says"):
        await push([replica], source=lambda: iter(items))


async def test_the_source_runs_on_the_callers_thread(replica):
    import threading

    threads = []
    source = CountingSource(make_manifest(), make_tensors())

    def noting():
        for item in source():
            threads.append(threading.current_thread().name)
            yield item

    with ThreadPoolExecutor(1, thread_name_prefix="model") as executor:
        await push([replica], source=noting, executor=executor)
    assert set(threads) == {"model_0"}


async def test_a_cancelled_push_drains_and_aborts(replica):
    entered, release = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    source = CountingSource(make_manifest(), make_tensors())

    def slow():
        for item in source():
            loop.call_soon_threadsafe(entered.set)
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result()
            yield item

    task = asyncio.create_task(push([replica], source=slow))
    await entered.wait()
    task.cancel()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert source.ended == 1
    assert replica.calls[-1] == "abort"
    assert replica.version == 0


async def test_a_push_cancelled_while_it_assembles_leaves_no_call_behind(replica):
    entered, cancelled = asyncio.Event(), asyncio.Event()

    async def hang():
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    replica.before["prepare"] = hang
    source = CountingSource(make_manifest(), make_tensors())
    task = asyncio.create_task(push([replica], source=source))
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled.is_set()
    assert source.given == 0


async def test_nothing_disturbs_a_commit_under_way(replica):
    """The engine is reading the staged tensors: a new push, an abort and a close must wait."""
    entered, go_on = asyncio.Event(), asyncio.Event()

    async def slow(tensors, version):
        first, *rest = tensors
        entered.set()
        await go_on.wait()
        replica.weights = dict([first, *rest])
        return 0

    replica._load = slow
    pushing = asyncio.create_task(push([replica], epoch=10))
    await entered.wait()
    await replica.abort_weights(AbortWeightsRequest(epoch=10))
    other = await push([replica], epoch=20)
    assert "epoch 10 is being committed" in other.replicas[0].error
    replica.inbox.close()
    go_on.set()
    assert (await pushing).replicas[0].committed
    assert replica.has(make_tensors())
    assert not replica.inbox.busy


async def test_files_without_a_folder_are_refused(replica):
    with pytest.raises(ConfigError, match="folder"):
        await push([replica], backend=PushBackend.FILE)
    with pytest.raises(ConfigError, match="/proc/nowhere"):
        await push([replica], backend=PushBackend.FILE, folder="/proc/nowhere")


async def test_an_old_epoch_is_refused(replica):
    await push([replica], epoch=5)
    result = await push([replica], epoch=5)
    assert "epoch 5 is not newer than 5" in result.replicas[0].error


async def test_phases_out_of_order_are_refused(replica):
    with pytest.raises(StateError, match="no push of epoch 9"):
        await replica.commit_weights(CommitWeightsRequest(epoch=9, policy_version=1, digest=""))
    await replica.abort_weights(AbortWeightsRequest(epoch=9))  # an unknown epoch is no error
    assert not replica.inbox.busy


async def test_space_is_checked_before_anything_is_sent(monkeypatch):
    monkeypatch.setattr(landing, "free_bytes", lambda device: 10)
    with pytest.raises(InfraError, match="no room") as caught:
        landing.check_space(11, "cpu")
    assert caught.value.info.reason == "WEIGHTS_NO_SPACE"
    landing.check_space(10, "cpu")


def test_names_are_request_errors():
    with pytest.raises(RequestError):
        plan_buckets(replace(make_manifest(), tensors=()))

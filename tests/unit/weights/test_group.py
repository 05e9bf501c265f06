"""The group by itself: addresses, deadlines, and what a member that is gone looks like."""

import socket
import threading
import time

import pytest
import torch

from quartet.errors import ConfigError, DeadlineError, InfraError
from quartet.types import PushBackend
from quartet.weights.assemble import sender_host, split_address
from quartet.weights.group import (
    SenderStore,
    connect_store,
    form_group,
    join_address,
    local_address_towards,
)
from quartet.weights.worker import Worker

HOST = "127.0.0.1"


def member(store, rank, world_size, *, name="g", timeout=2.0):
    return form_group(
        backend=PushBackend.GLOO,
        store=store,
        group_name=name,
        rank=rank,
        world_size=world_size,
        host=HOST,
        timeout=timeout,
    )


@pytest.fixture
def store():
    return SenderStore(HOST, timeout=2.0)


@pytest.fixture
def pair(store):
    worker = Worker("other")
    other = worker.submit(lambda: member(connect_store(store.address(HOST), timeout=2.0), 1, 2))
    yield member(store.store, 0, 2), other.result(5), worker
    worker.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_broadcasts_any_dtype(pair, dtype):
    sender, receiver, worker = pair
    sent = torch.randn(1000).to(dtype)
    got = torch.zeros_like(sent)
    received = worker.submit(receiver.broadcast, got)
    sender.broadcast(sent)
    received.result(5)
    assert torch.equal(got, sent)


def test_the_default_world_stays_untouched(store):
    before = torch.distributed.is_initialized()  # tests of other rooms may have formed it
    worker = Worker("other")
    other = worker.submit(lambda: member(connect_store(store.address(HOST), timeout=2.0), 1, 2))
    groups = (member(store.store, 0, 2), other.result(5))
    worker.close()
    assert torch.distributed.is_initialized() is before
    if before:
        assert torch.distributed.get_world_size() == 1
    del groups


def test_a_member_that_does_not_come_is_a_deadline(store):
    begun = time.monotonic()
    with pytest.raises(DeadlineError, match=r"forming the group was not done in 0\.5 s"):
        member(store.store, 0, 2, timeout=0.5)
    assert time.monotonic() - begun < 1.5


def test_a_member_that_does_not_answer_is_a_deadline(pair):
    _, receiver, _ = pair
    begun = time.monotonic()
    with pytest.raises(DeadlineError, match="broadcast"):
        receiver.broadcast(torch.zeros(10))
    assert time.monotonic() - begun < 4.0


def test_closing_returns_at_once_though_a_member_is_inside(pair):
    _, receiver, worker = pair
    inside = worker.submit(receiver.broadcast, torch.zeros(10))
    begun = time.monotonic()
    receiver.close(abort=True)
    assert time.monotonic() - begun < 0.5
    with pytest.raises((DeadlineError, InfraError, AttributeError)):
        inside.result(10)


def test_the_port_is_taken_from_the_start(store):
    with pytest.raises(OSError, match="in use"):
        socket.create_server((HOST, store.port))


def test_a_store_that_is_not_there_is_named():
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(InfraError, match=f"{HOST}:{port}"):
        connect_store(f"{HOST}:{port}", timeout=0.5)


def test_backends_that_form_no_group_are_refused(store):
    for backend in (PushBackend.FILE, PushBackend.NCCL):
        if backend is PushBackend.NCCL and torch.distributed.is_nccl_available():
            continue
        with pytest.raises(ConfigError, match="backend"):
            form_group(
                backend=backend,
                store=store.store,
                group_name="x",
                rank=0,
                world_size=1,
                host=HOST,
                timeout=1.0,
            )


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("127.0.0.1:7001", "127.0.0.1", 7001),
        ("dns:///rollout-0.local:7001", "rollout-0.local", 7001),
        ("ipv4:10.0.0.1:5", "10.0.0.1", 5),
        ("[::1]:9", "::1", 9),
        ("unix:/run/rollout.sock", "127.0.0.1", 1),
    ],
)
def test_addresses(address, host, port):
    assert split_address(address) == (host, port)


def test_store_addresses_go_round(store):
    assert join_address(store.address(HOST)) == (HOST, store.port)
    assert join_address(store.address("::1")) == ("::1", store.port)


def test_the_sender_listens_where_all_replicas_reach_it(monkeypatch):
    assert local_address_towards(HOST, 1) == HOST
    assert sender_host([f"{HOST}:7001", f"{HOST}:7002"]) == HOST
    ways = {"far": "192.0.2.7", HOST: HOST}
    monkeypatch.setattr(
        "quartet.weights.assemble.local_address_towards", lambda host, port: ways[host]
    )
    assert sender_host([f"{HOST}:1", "far:1"]) == "192.0.2.7"


def test_a_worker_can_be_left_behind():
    stuck, free = Worker("stuck"), threading.Event()
    blocked = stuck.submit(free.wait)
    after = stuck.submit(lambda: 1 / 0)
    stuck.close()
    assert not blocked.done()
    free.set()
    assert blocked.result(5) is True
    with pytest.raises(ZeroDivisionError):
        after.result(5)

"""The sender's blocking half: what runs beside what, and what a send that fails leaves alone."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from quartet.errors import InfraError
from quartet.testing.push import CountingSource, make_manifest, make_tensors
from quartet.weights import lane as lane_module
from quartet.weights import pack_bucket, plan_buckets
from quartet.weights.digest import PushDigest, bucket_digest
from quartet.weights.lane import SendLane

BUCKETS = plan_buckets(make_manifest())
WAIT = 20.0
"""Seconds after which an event that never comes fails a test."""


class Wire:
    """A transport that keeps what was sent; `before` is called with the index of each bucket."""

    def __init__(self, before=None):
        self.before = before
        self.sent = []
        self.aborted = None

    def send(self, bucket, flat):
        if self.before is not None:
            self.before(bucket.index)
        self.sent.append(flat.clone())

    def receive(self, bucket, flat):
        raise AssertionError("a sender receives nothing")

    def close(self, *, abort=False):
        self.aborted = abort


class Reusing:
    """A source with two buffers, filled in turn, as a learner's is."""

    def __init__(self, on_asked=None):
        self.buffers = [torch.empty(max(b.numel for b in BUCKETS)) for _ in range(2)]
        self.on_asked = on_asked
        self.ended = 0

    def __call__(self):
        for bucket in BUCKETS:
            if self.on_asked is not None:
                self.on_asked(bucket.index)
            yield (
                bucket.index,
                pack_bucket(bucket, make_tensors(), out=self.buffers[bucket.index % 2]),
            )
        self.ended += 1


def run(source, wire, *, timeout=WAIT):
    lane = SendLane(BUCKETS, wire, timeout=timeout)
    try:
        lane.pump(source)
    finally:
        lane.close()
    return lane


def flats():
    return [pack_bucket(bucket, make_tensors()) for bucket in BUCKETS]


def test_everything_is_sent_in_order_and_digested():
    wire = Wire()
    lane = run(Reusing(), wire)
    assert not lane.broken
    assert all(torch.equal(a, b) for a, b in zip(wire.sent, flats(), strict=True))
    total = PushDigest()
    for index, flat in enumerate(flats()):
        assert lane.digest_of(index).result() == bucket_digest(flat)
        total.update(bucket_digest(flat))
    assert lane.hexdigest() == total.hexdigest()
    assert lane.num_sent == len(BUCKETS)
    assert wire.aborted is False


def test_the_next_bucket_is_made_while_one_is_sent():
    asked = [threading.Event() for _ in BUCKETS]

    def wait_for_the_next(index):
        if index + 1 < len(BUCKETS):
            assert asked[index + 1].wait(WAIT), "nobody asked for the next bucket meanwhile"

    lane = run(Reusing(lambda index: asked[index].set()), Wire(wait_for_the_next))
    assert lane.error == ""


def test_a_buffer_is_filled_again_only_when_it_is_sent_and_digested(monkeypatch):
    done = []
    slow = threading.Event()

    def digest(flat):
        slow.wait(0.05)
        done.append("digest")
        return bucket_digest(flat)

    def asked(index):
        if index >= 2:
            assert done.count("sent") >= index - 1
            assert done.count("digest") >= index - 1

    def sending(index):
        slow.wait(0.05)
        done.append("sent")

    monkeypatch.setattr(lane_module, "bucket_digest", digest)
    assert run(Reusing(asked), Wire(sending)).error == ""


def test_a_send_that_hangs_costs_its_deadline_and_the_source_is_drained():
    release = threading.Event()
    source = Reusing()
    lane = run(source, Wire(lambda index: release.wait(WAIT)), timeout=0.3)
    assert not release.is_set()
    release.set()
    assert source.ended == 1
    assert "bucket 0 was not taken in 0.3 s" in lane.error
    assert lane.num_sent == 2  # the second waited behind it, and never left


def test_what_waits_behind_a_send_that_hangs_is_not_sent_later():
    release = threading.Event()
    wire = Wire(lambda index: release.wait(WAIT))
    lane = run(Reusing(), wire, timeout=0.1)
    release.set()
    lane._sender.join(WAIT)
    assert len(wire.sent) == 1
    assert wire.aborted is True


def test_the_deadline_runs_while_the_next_bucket_is_made(monkeypatch):
    """A slow gather is no excuse for a replica that stands still."""
    release, stuck = threading.Event(), threading.Event()
    allowed = []

    def hang(index):
        stuck.set()
        release.wait(WAIT)

    def gather(index):
        if index == 1:
            assert stuck.wait(WAIT)
            release.wait(0.3)

    def wait(jobs, *, timeout, return_when):
        allowed.append(timeout)
        return real(jobs, timeout=timeout, return_when=return_when)

    real = lane_module.concurrent.futures.wait
    monkeypatch.setattr(lane_module.concurrent.futures, "wait", wait)
    lane = run(Reusing(gather), Wire(hang), timeout=0.2)
    release.set()
    assert allowed[0] == 0.0
    assert lane.error == "bucket 0 was not taken in 0.2 s"


def test_a_send_that_fails_is_named():
    def fail(index):
        if index == 1:
            raise InfraError("the group is gone")

    source = CountingSource(make_manifest(), make_tensors())
    lane = run(source, Wire(fail))
    assert lane.error == "bucket 1: the group is gone"
    assert source.ended == 1


def test_a_digest_that_fails_breaks_the_push_off(monkeypatch):
    def fail(flat):
        raise MemoryError("no memory")

    monkeypatch.setattr(lane_module, "bucket_digest", fail)
    source = CountingSource(make_manifest(), make_tensors())
    lane = run(source, Wire())
    assert lane.error == "the digest of bucket 0: no memory"
    assert source.ended == 1


def test_a_bucket_that_was_not_sent_has_no_digest():
    lane = run(Reusing(), Wire())
    for index in (-1, len(BUCKETS)):
        with pytest.raises(InfraError, match=f"bucket {index} has not been sent"):
            lane.digest_of(index)


def test_the_clock_knows_each_phase():
    lane = run(Reusing(), Wire(lambda index: time.sleep(0.01)))
    assert lane.clock.seconds("broadcast") >= 0.01 * len(BUCKETS)
    assert lane.clock.seconds("digest") > 0
    assert lane.clock.seconds("gather") == 0  # this source says nothing of it

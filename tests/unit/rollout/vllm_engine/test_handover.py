"""Tensors on their way to other processes."""

import multiprocessing
import os
from pathlib import Path

import pytest
import torch
from quartet_rollout.engines.vllm import handover
from quartet_rollout.engines.vllm.handover import SharedStaging, mapped, written

from quartet.errors import InfraError
from quartet.types import TensorSpec, WeightManifest
from quartet.weights import pack_bucket, plan_buckets

TENSORS = {
    "a": torch.randn(3, 5),
    "b": torch.arange(7, dtype=torch.bfloat16),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "c": torch.randn(40),
    "d": torch.randn(33),
}
BUCKETS = plan_buckets(
    WeightManifest(
        tensors=tuple(
            TensorSpec(name=name, dtype=str(t.dtype).removeprefix("torch."), shape=tuple(t.shape))
            for name, t in TENSORS.items()
        ),
        bucket_bytes=200,
    )
)


@pytest.fixture(params=["anonymous", "named"])
def memory(request, monkeypatch, tmp_path):
    """With memory that has no name, and on systems without it."""
    if request.param == "named":
        monkeypatch.setattr(handover, "_anonymous", lambda: None)
        monkeypatch.setattr(handover, "_folder", lambda needed: str(tmp_path))
    yield request.param
    assert list(tmp_path.iterdir()) == []
    open_files = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert not [path for path in open_files if "quartet-weights" in path]


def read_elsewhere(path, entries, wanted, found):
    found.put([torch.equal(t, wanted[name]) for name, t in mapped(path, entries)])


def test_what_is_written_is_what_is_mapped(memory):
    strided = {"strided": torch.randn(6, 4).t()}
    with written([*TENSORS.items(), *strided.items()]) as there:
        found = dict(mapped(there.path, there.entries))
        assert found.keys() == TENSORS.keys() | strided.keys()
        for name, tensor in {**TENSORS, **strided}.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor)
    assert not Path(there.path).exists()


def test_it_is_gone_after_an_error_too(memory):
    with pytest.raises(ValueError, match="no"), written([("a", torch.ones(2))]) as there:
        raise ValueError("no")
    assert not Path(there.path).exists()


def test_what_is_received_there_is_there_for_another_process(memory):
    staging = SharedStaging()
    for bucket, flat in zip(BUCKETS, staging.buffers(BUCKETS), strict=True):
        assert flat.numel() == bucket.numel
        pack_bucket(bucket, TENSORS, out=flat)
    there = staging.tensors(BUCKETS)
    assert len(BUCKETS) > 3
    context = multiprocessing.get_context("spawn")
    found = context.SimpleQueue()
    other = context.Process(target=read_elsewhere, args=(there.path, there.entries, TENSORS, found))
    other.start()
    try:
        assert found.get() == [True] * len(TENSORS)
    finally:
        other.join()
    # The engine of this process sees the same.
    assert {name: tuple(t.shape) for name, t in there} == {
        n: tuple(t.shape) for n, t in TENSORS.items()
    }
    del there, flat
    staging.close()
    staging.close()


def test_what_does_not_fit_is_refused_before_anything_is_sent(memory, monkeypatch):
    def full(descriptor, start, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(InfraError, match="No space left") as caught:
        SharedStaging().buffers(BUCKETS)
    assert caught.value.info.reason == "WEIGHTS_NO_SPACE"

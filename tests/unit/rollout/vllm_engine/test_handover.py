"""Tensors on their way to another process."""

from pathlib import Path

import pytest
import torch
from quartet_rollout.engines.vllm.handover import mapped, written


def test_what_is_written_is_what_is_mapped():
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.arange(7, dtype=torch.bfloat16),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "strided": torch.randn(6, 4).t(),
    }
    with written(tensors.items()) as (path, entries):
        found = dict(mapped(path, entries))
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor)
    assert not Path(path).exists()


def test_the_file_is_gone_after_an_error_too():
    with pytest.raises(ValueError, match="no"), written([("a", torch.ones(2))]) as (path, _):
        raise ValueError("no")
    assert not Path(path).exists()

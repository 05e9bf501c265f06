import pytest
import torch

from quartet.errors import RequestError
from quartet.types import TensorSpec, WeightManifest
from quartet.weights import flat_tensor, pack_bucket, plan_buckets, unpack_bucket
from quartet.weights.tensors import empty_bucket


def bucket_of(*shapes, dtype="float32"):
    specs = tuple(
        TensorSpec(name=f"t{i}", dtype=dtype, shape=shape) for i, shape in enumerate(shapes)
    )
    (bucket,) = plan_buckets(WeightManifest(tensors=specs, bucket_bytes=1 << 30, aliases={}))
    return bucket


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("rows", [0, 3, 5000])
def test_a_buffer_of_any_size_holds_what_is_packed(rows, dtype):
    bucket = bucket_of((rows, 257), (), (rows, 1), dtype=dtype)
    values = {
        slot.name: torch.randn(slot.shape).to(getattr(torch, dtype)) for slot in bucket.tensors
    }
    flat = pack_bucket(bucket, values, out=empty_bucket(bucket))
    assert flat.shape == (bucket.numel,)
    assert all(torch.equal(values[name], tensor) for name, tensor in unpack_bucket(bucket, flat))


def test_the_only_tensor_of_a_bucket_is_not_copied():
    bucket = bucket_of((4, 6))
    tensor = torch.randn(4, 6, requires_grad=True)
    flat = flat_tensor(bucket, tensor)
    assert flat.data_ptr() == tensor.data_ptr()
    assert not flat.requires_grad
    turned = torch.randn(6, 4).T
    assert torch.equal(flat_tensor(bucket, turned), turned.reshape(-1))


@pytest.mark.parametrize("tensor", [torch.zeros(6, 4), torch.zeros(4, 6, dtype=torch.bfloat16)])
def test_a_tensor_of_another_form_than_planned_is_refused(tensor):
    bucket = bucket_of((4, 6))
    for make in (lambda: flat_tensor(bucket, tensor), lambda: pack_bucket(bucket, {"t0": tensor})):
        with pytest.raises(RequestError, match=r"t0 is .* the manifest says float32 \[4, 6\]"):
            make()

"""Buckets as torch buffers, and the manifest of a model."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from quartet.errors import RequestError
from quartet.types import TensorSpec, WeightManifest
from quartet.weights.manifest import Bucket, TensorSlot

if TYPE_CHECKING:
    import torch

_HUGE_FROM = 4 << 20
"""Bytes from which a buffer is worth a mapping of its own."""


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a manifest's dtype name."""
    import torch

    return getattr(torch, name)


def dtype_name(dtype: torch.dtype) -> str:
    """The manifest's name of a torch dtype."""
    return str(dtype).removeprefix("torch.")


def manifest_of_model(model: torch.nn.Module, *, bucket_bytes: int = 64 << 20) -> WeightManifest:
    """List a model's parameters under their own names, in their own order.

    Of names that share one parameter the first is sent and the others become aliases. Buffers are
    left out: they are computed from the configuration and never trained. Parameters partitioned by
    ZeRO-3 count with their full shape.
    """
    first: dict[int, str] = {}
    tensors: list[TensorSpec] = []
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        if owner != name:
            aliases[name] = owner
            continue
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        tensors.append(TensorSpec(name=name, dtype=dtype_name(parameter.dtype), shape=shape))
    return WeightManifest(tensors=tuple(tensors), bucket_bytes=bucket_bytes, aliases=aliases)


def empty_bucket(bucket: Bucket, device: torch.device | str = "cpu") -> torch.Tensor:
    """An uninitialised flat buffer for one bucket, [numel]."""
    import torch

    dtype = torch_dtype(bucket.dtype)
    if torch.device(device).type == "cpu" and bucket.nbytes >= _HUGE_FROM:
        return torch.frombuffer(_huge_pages(bucket.nbytes), dtype=dtype)
    return torch.empty(bucket.numel, dtype=dtype, device=device)


def _huge_pages(size: int) -> mmap.mmap:
    """Memory whose first touch is cheap: in small pages it costs more than the bytes that come."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # a system that has no such pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def pack_bucket(
    bucket: Bucket, tensors: Mapping[str, torch.Tensor], out: torch.Tensor | None = None
) -> torch.Tensor:
    """Lay a bucket's tensors end to end.

    Args:
        bucket: The plan.
        tensors: By name; more names than the bucket's may be there.
        out: Flat buffer to fill, [>= numel] of the bucket's dtype; made when None.

    Returns:
        The flat buffer, [numel].

    Raises:
        RequestError: A tensor has another shape or dtype than the plan.
    """
    some = tensors[bucket.tensors[0].name]
    flat = empty_bucket(bucket, some.device) if out is None else out[: bucket.numel]
    for slot in bucket.tensors:
        tensor = tensors[slot.name].detach()
        _check_fits(bucket, slot, tensor)
        flat[slot.offset : slot.offset + slot.numel].copy_(tensor.reshape(-1))
    return flat


def flat_tensor(bucket: Bucket, tensor: torch.Tensor) -> torch.Tensor:
    """The only tensor of a bucket as its flat buffer, [numel]: the same memory, if contiguous.

    Raises:
        RequestError: The tensor has another shape or dtype than the plan.
    """
    (slot,) = bucket.tensors
    _check_fits(bucket, slot, tensor)
    return tensor.detach().reshape(-1)


def unpack_bucket(bucket: Bucket, flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a bucket as views into its flat buffer."""
    for slot in bucket.tensors:
        yield slot.name, flat[slot.offset : slot.offset + slot.numel].view(slot.shape)


def _check_fits(bucket: Bucket, slot: TensorSlot, tensor: torch.Tensor) -> None:
    if tuple(tensor.shape) != slot.shape or dtype_name(tensor.dtype) != bucket.dtype:
        raise RequestError(
            f"{slot.name} is {dtype_name(tensor.dtype)} {list(tensor.shape)}, the manifest "
            f"says {bucket.dtype} {list(slot.shape)}",
            reason="WEIGHTS_MANIFEST_STALE",
            field=f"manifest.tensors.{slot.name}",
            remedy="make the manifest from the model that is pushed",
        )

"""Which tensors a push carries and how they are cut into buckets. Knows no torch.

Sender and receiver never exchange a plan: both compute it from the same `WeightManifest`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from quartet.errors import RequestError
from quartet.types import TensorSpec, WeightManifest

_DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
MAX_NAMED = 5
"""Names that an error lists before it says how many more there are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSlot:
    """Where one tensor lies in its bucket."""

    name: str
    shape: tuple[int, ...]
    offset: int
    """First element, counted in elements of the bucket's dtype."""
    numel: int
    """Elements."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Tensors of one dtype, laid end to end without padding in one flat buffer."""

    index: int
    """Number of the bucket, from 0."""
    dtype: str
    """torch name without the prefix."""
    tensors: tuple[TensorSlot, ...]

    @property
    def numel(self) -> int:
        """Elements of the flat buffer."""
        last = self.tensors[-1]
        return last.offset + last.numel

    @property
    def nbytes(self) -> int:
        """Bytes of the flat buffer."""
        return self.numel * dtype_bytes(self.dtype)


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element, or RequestError for a dtype that a push cannot carry."""
    try:
        return _DTYPE_BYTES[dtype]
    except KeyError:
        raise RequestError(
            f"a weight push cannot carry tensors of dtype {dtype}",
            reason="WEIGHTS_DTYPE_UNSUPPORTED",
            field="manifest.tensors.data_type",
            value=dtype,
            remedy=f"use one of {', '.join(_DTYPE_BYTES)}",
        ) from None


def total_bytes(manifest: WeightManifest) -> int:
    """Bytes of all tensors."""
    return sum(math.prod(t.shape) * dtype_bytes(t.dtype) for t in manifest.tensors)


def plan_buckets(manifest: WeightManifest) -> tuple[Bucket, ...]:
    """Cut a manifest into buckets, the same way on every side.

    Consecutive tensors of one dtype share a bucket until the next would pass `bucket_bytes`. A
    larger tensor is a bucket of its own.

    Example:
        >>> spec = [TensorSpec(name=n, dtype="float32", shape=(4,)) for n in "abc"]
        >>> plan = plan_buckets(WeightManifest(tensors=tuple(spec), bucket_bytes=32))
        >>> [[slot.name for slot in bucket.tensors] for bucket in plan]
        [['a', 'b'], ['c']]
    """
    _check_shape(manifest)
    return tuple(
        Bucket(index=index, dtype=specs[0].dtype, tensors=tuple(_slots(specs)))
        for index, specs in enumerate(_runs(manifest))
    )


def check_manifest(sent: WeightManifest, wanted: WeightManifest) -> None:
    """Raise RequestError unless `sent` fills exactly the tensors of `wanted`.

    Order and bucket size are the sender's choice. Names, shapes and dtypes must agree: a tensor
    cast in silence would make the policy that samples another one than the policy that trains.
    """
    _check_shape(sent)
    have = {t.name: t for t in sent.tensors}
    want = {t.name: t for t in wanted.tensors}
    tied = sorted(name for name in have if name in wanted.aliases)
    if tied:
        raise _mismatch(
            "the replica ties what the sender holds apart",
            tied,
            "push a model with tied embeddings",
        )
    if missing := sorted(want.keys() - have.keys()):
        raise _mismatch("the push lacks tensors", missing, "push the model that the replica loaded")
    if unknown := sorted(have.keys() - want.keys()):
        raise _mismatch(
            "the push has tensors unknown here", unknown, "push the model that the replica loaded"
        )
    for name, spec in have.items():
        _check_tensor(spec, want[name])
    untied = sorted(a for a, target in sent.aliases.items() if wanted.aliases.get(a) != target)
    if untied:
        raise _mismatch("the sender ties what the replica does not", untied, "untie the embeddings")


def _check_shape(manifest: WeightManifest) -> None:
    """Raise RequestError for a manifest that describes no push."""
    names = [t.name for t in manifest.tensors]
    if not names:
        raise _wrong("tensors", "0", "a push without tensors", "list at least one")
    if len(set(names)) < len(names):
        twice = sorted({n for n in names if names.count(n) > 1})
        raise _mismatch("the push names tensors twice", twice, "send each name once")
    if manifest.bucket_bytes < 1:
        raise _wrong("bucket_bytes", str(manifest.bucket_bytes), "no size", "give 1 or more")
    for spec in manifest.tensors:
        if any(n < 0 for n in spec.shape):
            raise _wrong("tensors.shape", f"{spec.name} {spec.shape}", "no shape", "give sizes")
        dtype_bytes(spec.dtype)


def _check_tensor(sent: TensorSpec, wanted: TensorSpec) -> None:
    if sent.shape != wanted.shape:
        raise RequestError(
            f"{sent.name} has shape {list(sent.shape)} in the push and {list(wanted.shape)} here",
            reason="WEIGHTS_SHAPE_MISMATCH",
            field=f"manifest.tensors.{sent.name}.shape",
            value=str(list(sent.shape)),
            remedy="push the model that the replica loaded",
        )
    if sent.dtype != wanted.dtype:
        raise RequestError(
            f"{sent.name} is {sent.dtype} in the push and {wanted.dtype} here",
            reason="WEIGHTS_DTYPE_MISMATCH",
            field=f"manifest.tensors.{sent.name}.data_type",
            value=sent.dtype,
            remedy="start learner and rollout with the same ds.param_dtype",
        )


def _runs(manifest: WeightManifest) -> Iterator[list[TensorSpec]]:
    run: list[TensorSpec] = []
    size = 0
    for spec in manifest.tensors:
        nbytes = math.prod(spec.shape) * dtype_bytes(spec.dtype)
        if run and (spec.dtype != run[0].dtype or size + nbytes > manifest.bucket_bytes):
            yield run
            run, size = [], 0
        run.append(spec)
        size += nbytes
    yield run


def _slots(specs: Iterable[TensorSpec]) -> Iterator[TensorSlot]:
    offset = 0
    for spec in specs:
        numel = math.prod(spec.shape)
        yield TensorSlot(name=spec.name, shape=spec.shape, offset=offset, numel=numel)
        offset += numel


def _mismatch(problem: str, names: list[str], remedy: str) -> RequestError:
    shown = ", ".join(names[:MAX_NAMED])
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return RequestError(
        f"{problem}: {shown}{more}",
        reason="WEIGHTS_NAME_MISMATCH",
        field="manifest.tensors",
        value=names[0],
        remedy=remedy,
    )


def _wrong(name: str, value: str, problem: str, remedy: str) -> RequestError:
    return RequestError(
        f"manifest.{name} {value} is {problem}",
        reason="WEIGHTS_MANIFEST_INVALID",
        field=f"manifest.{name}",
        value=value,
        remedy=remedy,
    )

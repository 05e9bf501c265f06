"""Tensors for other processes of this machine, in memory that all of them map.

vLLM's workers are processes of their own, and what is sent to them goes through their message
queue as a copy in bytes. What a push brings is received into memory that the workers can map, and
is not copied again before they load it.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from quartet.errors import InfraError
from quartet.weights.landing import NamedTensors, check_space
from quartet.weights.manifest import Bucket
from quartet.weights.tensors import torch_dtype

Entry = tuple[str, str, tuple[int, ...], int]
"""Name, torch name of the dtype, shape, first byte in the memory."""

_IN_MEMORY = Path("/dev/shm")
_OPEN_FILES = "/proc/"
_ALIGNMENT = 64


class SharedMemory:
    """A block of memory that other processes of this machine find by a path.

    It has no name in any folder where the system can do without: then it is gone with the last
    process that holds it, however that one ends.

    Attributes:
        path: What to give to `mapped`, or to `flat_bytes`, in another process.
    """

    def __init__(self, size: int) -> None:
        """Reserve `size` bytes; raises InfraError without room for them."""
        self._descriptor, self.path = _anonymous() or _named(size)
        self._is_open = True
        try:
            os.posix_fallocate(self._descriptor, 0, max(size, 1))
        except OSError as error:
            self.close()
            raise InfraError(
                f"no room for {size / 2**30:.2f} GiB of new weights in shared memory: "
                f"{error.strerror}",
                reason="WEIGHTS_NO_SPACE",
                remedy="give the service more memory",
            ) from error

    def close(self) -> None:
        """Let go of it; what is mapped stays until its tensors are gone."""
        if self._is_open:
            self._is_open = False
            os.close(self._descriptor)
            if not self.path.startswith(_OPEN_FILES):
                Path(self.path).unlink(missing_ok=True)


class InSharedMemory:
    """Named tensors that lie in shared memory, for processes that can map it."""

    def __init__(self, memory: SharedMemory, entries: Sequence[Entry]) -> None:
        self.path = memory.path
        self.entries = list(entries)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors, for this process."""
        return mapped(self.path, self.entries)


class SharedStaging:
    """A staging area in shared memory: what arrives there need not be copied for the workers."""

    def __init__(self) -> None:
        self._memory: SharedMemory | None = None

    def buffers(self, buckets: Sequence[Bucket]) -> list[torch.Tensor]:
        """One flat buffer a bucket; see `quartet.weights.landing.Staging`."""
        size = layout_bytes(buckets)
        check_space(size, "cpu")
        self._memory = SharedMemory(size)
        return bucket_buffers(self._memory.path, buckets)

    def keep(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """It lies where it stays."""

    def tensors(self, buckets: Sequence[Bucket]) -> NamedTensors:
        """Where they lie."""
        assert self._memory is not None, "buffers comes first"
        return InSharedMemory(self._memory, entries_of(buckets))

    def close(self) -> None:
        """Let go of the memory."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def layout_bytes(buckets: Sequence[Bucket]) -> int:
    """Bytes of memory for all buckets."""
    last = buckets[-1]
    return _starts(buckets)[-1] + last.nbytes


def bucket_buffers(path: str, buckets: Sequence[Bucket]) -> list[torch.Tensor]:
    """The flat buffer of each bucket in a shared memory, to be written."""
    whole = _flat_bytes(path, shared=True)
    return [
        whole[start : start + bucket.nbytes].view(torch_dtype(bucket.dtype))
        for start, bucket in zip(_starts(buckets), buckets, strict=True)
    ]


def entries_of(buckets: Sequence[Bucket]) -> list[Entry]:
    """Where the tensors of all buckets lie in a shared memory."""
    return [
        (
            slot.name,
            bucket.dtype,
            slot.shape,
            start + slot.offset * torch_dtype(bucket.dtype).itemsize,
        )
        for start, bucket in zip(_starts(buckets), buckets, strict=True)
        for slot in bucket.tensors
    ]


@contextmanager
def written(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[InSharedMemory]:
    """Copy tensors into shared memory that is let go of after the block."""
    held = list(tensors)
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for _, tensor in held]
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    memory = SharedMemory(sum(sizes))
    try:
        whole = _flat_bytes(memory.path, shared=True)
        entries: list[Entry] = []
        for start, (name, tensor) in zip(starts, held, strict=True):
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            whole[start : start + tensor.nbytes].copy_(flat)
            dtype_name = str(tensor.dtype).removeprefix("torch.")
            entries.append((name, dtype_name, tuple(tensor.shape), start))
        yield InSharedMemory(memory, entries)
    finally:
        memory.close()


def mapped(path: str, entries: Sequence[Entry]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a shared memory, as views. Read-only by agreement."""
    whole = _flat_bytes(path, shared=False)
    for name, dtype_name, shape, start in entries:
        dtype = torch_dtype(dtype_name)
        nbytes = math.prod(shape) * dtype.itemsize
        yield name, whole[start : start + nbytes].view(dtype).view(tuple(shape))


def _flat_bytes(path: str, *, shared: bool) -> torch.Tensor:
    return torch.from_file(path, shared=shared, size=os.path.getsize(path), dtype=torch.uint8)


def _starts(buckets: Sequence[Bucket]) -> list[int]:
    starts, end = [], 0
    for bucket in buckets:
        starts.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
        end = starts[-1] + bucket.nbytes
    return starts


def _anonymous() -> tuple[int, str] | None:
    """Descriptor and path of memory without a name, which no container's /dev/shm limits."""
    with contextlib.suppress(OSError, AttributeError):  # not on this system
        descriptor = os.memfd_create("quartet-weights")
        path = f"{_OPEN_FILES}{os.getpid()}/fd/{descriptor}"
        if os.path.exists(path):
            return descriptor, path
        os.close(descriptor)
    return None


def _named(size: int) -> tuple[int, str]:
    return tempfile.mkstemp(prefix="quartet-weights-", dir=_folder(size))


def _folder(needed: int) -> str:
    """Memory if it has the room: containers often get 64 MiB there."""
    if _IN_MEMORY.is_dir() and shutil.disk_usage(_IN_MEMORY).free > needed:
        return str(_IN_MEMORY)
    return tempfile.gettempdir()

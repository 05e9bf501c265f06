"""Tensors for another process of this machine, in a file that lies in memory.

vLLM's workers are processes of their own, and what is sent to them goes through their message
queue as a copy in bytes. A mapped file is copied once.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

Entry = tuple[str, str, tuple[int, ...], int]
"""Name, torch name of the dtype, shape, first byte in the file."""

_IN_MEMORY = Path("/dev/shm")
_ALIGNMENT = 64


@contextmanager
def written(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, list[Entry]]]:
    """Write tensors into a file that is gone after the block.

    Yields:
        The file's path, and where each tensor lies in it.
    """
    held = list(tensors)
    needed = sum(tensor.nbytes + _ALIGNMENT for _, tensor in held)
    descriptor, path = tempfile.mkstemp(prefix="quartet-weights-", dir=_folder(needed))
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield path, list(_write(file, held))
    finally:
        Path(path).unlink(missing_ok=True)


def mapped(path: str, entries: Sequence[Entry]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a file, as views of its memory. Read-only by agreement."""
    size = os.path.getsize(path)
    whole = torch.from_file(path, shared=False, size=size, dtype=torch.uint8)
    for name, dtype_name, shape, start in entries:
        dtype: torch.dtype = getattr(torch, dtype_name)
        nbytes = math.prod(shape) * dtype.itemsize
        yield name, whole[start : start + nbytes].view(dtype).view(tuple(shape))


def _write(file, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Entry]:  # noqa: ANN001
    for name, tensor in tensors:
        start = -(-file.tell() // _ALIGNMENT) * _ALIGNMENT
        file.seek(start)
        flat = tensor.detach().contiguous().cpu().view(-1)
        file.write(flat.view(torch.uint8).numpy().data)
        yield name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start
    file.flush()


def _folder(needed: int) -> str:
    """Memory if it has the room: containers often get 64 MiB there."""
    if _IN_MEMORY.is_dir() and shutil.disk_usage(_IN_MEMORY).free > needed:
        return str(_IN_MEMORY)
    return tempfile.gettempdir()

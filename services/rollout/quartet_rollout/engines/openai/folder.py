"""Weights as a folder that transformers, vLLM and most servers open: safetensors and config."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 2 << 30
"""Size at which a file closes. So much is copied once more on its way."""
_IN_MEMORY = Path("/dev/shm")
_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"})
_INDEX = ".index.json"
_ROOM = 1.1
"""Free space wanted, as a multiple of the weights."""


@contextmanager
def written(
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    like: Path,
    parent: str | None,
    shard_bytes: int = SHARD_BYTES,
) -> Iterator[Path]:
    """A model folder that is gone after the block.

    Args:
        tensors: All weights by name.
        like: The model's own folder: its other files are copied.
        parent: Where to make the folder; None takes memory where there is room, else the disk.
        shard_bytes: Most bytes of a file, a larger tensor aside.
    """
    held = list(tensors)
    needed = sum(tensor.nbytes for _, tensor in held)
    if parent is not None:
        Path(parent).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix="quartet-weights-", dir=parent or _folder(needed), ignore_cleanup_errors=True
    ) as name:
        folder = Path(name)
        # The server may run under another user.
        folder.chmod(0o755)
        _copy_others(like, folder)
        _write(folder, list(_shards(held, shard_bytes)))
        yield folder


def _copy_others(source: Path, target: Path) -> None:
    for path in source.iterdir():
        if path.is_file() and path.suffix not in _WEIGHTS and not path.name.endswith(_INDEX):
            shutil.copyfile(path, target / path.name)


def _shards(
    tensors: Iterable[tuple[str, torch.Tensor]], most: int
) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > most:
            yield shard
            shard = {}
        shard[name] = tensor
    if shard:
        yield shard


def _write(folder: Path, shards: Sequence[dict[str, torch.Tensor]]) -> None:
    from safetensors.torch import save_file

    places: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        name = name if len(shards) > 1 else "model.safetensors"
        # Views of one staging buffer: safetensors refuses tensors that share memory.
        copies = {key: tensor.detach().cpu().clone() for key, tensor in shard.items()}
        save_file(copies, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, name)
    if len(shards) > 1:
        total = sum(t.nbytes for shard in shards for t in shard.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / f"model.safetensors{_INDEX}").write_text(json.dumps(index))


def _folder(needed: int) -> str:
    """Memory if it has the room: containers often get 64 MiB there."""
    if _IN_MEMORY.is_dir() and shutil.disk_usage(_IN_MEMORY).free > _ROOM * needed:
        return str(_IN_MEMORY)
    return tempfile.gettempdir()

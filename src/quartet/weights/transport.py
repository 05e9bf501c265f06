"""How one bucket travels: group broadcast, or safetensors files on a disk that both sides see."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from quartet.errors import InfraError
from quartet.weights.group import BroadcastGroup
from quartet.weights.manifest import Bucket
from quartet.weights.tensors import pack_bucket, unpack_bucket

if TYPE_CHECKING:
    import torch


class Transport(Protocol):
    """One side of a push's data path. Calls block: run them on a Worker."""

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Send a flat buffer, [numel]."""
        ...

    def receive(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Fill a flat buffer, [numel]."""
        ...

    def close(self, *, abort: bool = False) -> None:
        """Let go of groups and files. Returns at once."""
        ...


class GroupTransport:
    """Buckets by broadcast in a gloo or NCCL group."""

    def __init__(self, group: BroadcastGroup) -> None:
        self._group = group

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Broadcast; a GPU's buffer goes through the host when the group is gloo."""
        if bucket.numel:
            self._group.broadcast(flat.detach().to(self._group.device))

    def receive(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Take part in the broadcast."""
        if bucket.numel:
            self._group.broadcast(flat)

    def close(self, *, abort: bool = False) -> None:
        """Drop the group."""
        self._group.close(abort=abort)


class FileTransport:
    """Buckets as safetensors files with the tensors under their names, in one folder a push.

    The sender writes all before the receivers read the first; a receiver never deletes.
    """

    def __init__(self, folder: str | Path, *, owner: bool) -> None:
        """`owner` is the side that makes and removes the folder: the sender."""
        self._folder = Path(folder)
        self._owner = owner
        if owner:
            self._folder.mkdir(parents=True, exist_ok=True)

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Write one file aside and rename it: a reader sees it whole or not at all."""
        from safetensors.torch import save_file

        path = self._path(bucket)
        # Views of one storage: safetensors refuses tensors that share memory.
        tensors = {name: t.cpu().clone() for name, t in unpack_bucket(bucket, flat.detach())}
        aside = path.with_suffix(".tmp")
        save_file(tensors, aside)
        aside.replace(path)

    def receive(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Read one file."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = self._path(bucket)
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise InfraError(
                f"cannot read {path}: {error}",
                reason="WEIGHTS_FILE_UNREADABLE",
                remedy="give a folder that the learner and every rollout replica see",
            ) from error
        pack_bucket(bucket, tensors, out=flat)

    def close(self, *, abort: bool = False) -> None:
        """Remove the folder if this side made it; `abort` changes nothing here."""
        if self._owner:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, bucket: Bucket) -> Path:
        return self._folder / f"bucket-{bucket.index:05d}.safetensors"

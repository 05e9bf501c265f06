"""What runs inside the workers of vLLM's own server: weights from a folder.

The server is started with `--worker-extension-cls` and the full name of `FolderSwap`. vLLM imports
this file there by name, so it must import nothing that a server does not need.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class FolderSwap:
    """Mixed into vLLM's Worker; `self` is the worker. Each public method is a collective_rpc."""

    def quartet_extension(self) -> dict[str, int]:
        """Say that this class is here: {"version": 1}."""
        return {"version": 1}

    def quartet_load_folder(self, folder: str = "") -> dict[str, int]:
        """Put the tensors of a folder in place of all weights. Generation must be paused.

        Args:
            folder: Holds `*.safetensors`, which every worker must see; empty is the model that the
                server was started with.

        Returns:
            How many tensors were taken: {"tensors": 0} for the server's own model.
        """
        from quartet_rollout.engines.vllm.reload import reload

        files = sorted(Path(folder).glob("*.safetensors")) if folder else []
        if folder and not files:
            raise FileNotFoundError(f"there is no *.safetensors in {folder}")
        count = [0]
        reload(self, _tensors(files, count) if files else None)
        return {"tensors": count[0]}


def _tensors(files: list[Path], count: list[int]) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    for path in files:
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no dict
                count[0] += 1
                yield name, tensors.get_tensor(name)

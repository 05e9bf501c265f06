"""The other process of the contenders of `python -m benchmarks.push`: it receives, or reads files.

One line of JSON on stdin is one turn, `{"sizes": [elements of each bucket]}` or `{"folder": path}`.
One line on stdout is the answer when all of it lies in memory. Memory is there before the first
turn is over, so later ones find it warm.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from quartet.types import PushBackend
from quartet.weights.group import BroadcastGroup, connect_store, form_group

ANSWER = "answer"
"""The line that ends a turn."""
TIMEOUT = 120.0
"""Seconds for any one step."""
HOST = "127.0.0.1"


def main(argv: list[str]) -> None:
    """Join the group at the store of the first argument, then take turns until there are none."""
    torch.set_num_threads(1)
    group = form_group(
        backend=PushBackend.GLOO,
        store=connect_store(argv[1], timeout=TIMEOUT),
        group_name="raw",
        rank=1,
        world_size=2,
        host=HOST,
        timeout=TIMEOUT,
    )
    buffers: dict[tuple[int, ...], list[torch.Tensor]] = {}
    weights: dict[str, torch.Tensor] = {}
    for line in sys.stdin:
        turn = json.loads(line)
        if "sizes" in turn:
            _receive(group, tuple(turn["sizes"]), buffers)
        else:
            _read(Path(turn["folder"]), weights)
        print(ANSWER, flush=True)


def _receive(
    group: BroadcastGroup,
    sizes: tuple[int, ...],
    buffers: dict[tuple[int, ...], list[torch.Tensor]],
) -> None:
    if sizes not in buffers:
        buffers.clear()
        buffers[sizes] = [torch.zeros(size) for size in sizes]
    for buffer in buffers[sizes]:
        group.broadcast(buffer)


def _read(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Read into memory that is there already, as an engine would."""
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            if name not in weights:
                weights[name] = torch.empty_like(tensor)
            weights[name].copy_(tensor)


if __name__ == "__main__":
    main(sys.argv)

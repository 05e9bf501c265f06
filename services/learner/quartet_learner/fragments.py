"""A training state on disk, in pieces that fit any number of ranks and any ZeRO stage.

Each rank writes the elements that it steps and nobody else writes, as safetensors:

    state_<rank>_<number>.safetensors     tensors "<kind>|<start>|<parameter>", flat fp32
                                          metadata "steps": JSON, optimizer steps by parameter

A rank that loads reads the elements that it will step, from whichever files have them. So a state
is written once, gathered nowhere, and read only where it is needed.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from quartet_learner.training_state import STEP, WEIGHT, Place, make_states, states

FILE_BYTES = 2 << 30
"""A file is closed when it holds this much: what a save takes of main memory beside a GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fragment:
    """Elements [start, end) of one kind of one parameter."""

    start: int
    end: int
    file: Path
    key: str


@dataclass(frozen=True, slots=True)
class Index:
    """What the files of a state hold. Only headers have been read."""

    fragments: dict[str, dict[str, list[Fragment]]] = field(default_factory=dict)
    """By parameter and kind, in order of their start."""
    steps: dict[str, int] = field(default_factory=dict)
    """Optimizer steps by parameter; those the optimizer has no state of are missing."""

    def kinds(self, name: str) -> list[str]:
        """The optimizer's states of a parameter."""
        return sorted(kind for kind in self.fragments.get(name, {}) if kind != WEIGHT)

    def first_gap(self, shapes: Mapping[str, Sequence[int]]) -> str:
        """Name of the first parameter of which something is missing, with its kind, or ""."""
        for name, shape in shapes.items():
            for kind in (WEIGHT, *self.kinds(name)):
                end = 0
                for fragment in self.fragments.get(name, {}).get(kind, ()):
                    if fragment.start != end:
                        break
                    end = fragment.end
                if end != prod(shape):
                    return f"{name} ({kind})"
        return ""


def write_state(deepspeed: Any, owned: Sequence[Place], folder: Path, rank: int) -> None:
    """Write the values and states of `owned`.

    Raises:
        OSError, SafetensorError: the disk refused.
    """
    pending: dict[str, Tensor] = {}
    steps: dict[str, int] = {}
    size = number = 0

    def flush() -> None:
        nonlocal size, number
        file = folder / f"state_{rank}_{number}.safetensors"
        save_file(pending, file, metadata={"steps": json.dumps(steps)})
        pending.clear()
        steps.clear()
        size, number = 0, number + 1

    for place in owned:
        remembered = states(deepspeed, place.holder)
        if STEP in remembered:
            steps[place.name] = int(remembered[STEP])
        for kind, values in _tensors(place, remembered):
            part = place.read(values).to("cpu", torch.float32, copy=True)
            pending[f"{kind}|{place.start}|{place.name}"] = part
            size += part.nbytes
        if size >= FILE_BYTES:
            flush()
    if pending:
        flush()


def read_index(folder: Path) -> Index:
    """The headers of all files of a state."""
    index = Index()
    for file in sorted(folder.glob("state_*_*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - not a mapping
                kind, start, name = key.split("|", 2)
                first = int(start)
                end = first + opened.get_slice(key).get_shape()[0]
                kinds = index.fragments.setdefault(name, {})
                kinds.setdefault(kind, []).append(
                    Fragment(start=first, end=end, file=file, key=key)
                )
            index.steps.update(json.loads((opened.metadata() or {}).get("steps", "{}")))
    for kinds in index.fragments.values():
        for kind, fragments in kinds.items():
            # Ranks that hold the same elements wrote them alike.
            once = {(fragment.start, fragment.end): fragment for fragment in fragments}
            kinds[kind] = [once[place] for place in sorted(once)]
    return index


def read_state(deepspeed: Any, wanted: Sequence[Place], index: Index) -> None:
    """Fill the places `wanted` and the optimizer's states of their holders.

    A holder of several parameters has one count of steps: the highest of theirs.
    """
    by_holder: dict[int, list[Place]] = defaultdict(list)
    for place in wanted:
        by_holder[id(place.holder)].append(place)
    opened: dict[Path, Any] = {}
    for together in by_holder.values():
        holder = together[0].holder
        kinds = sorted({kind for place in together for kind in index.kinds(place.name)})
        remembered: dict[str, Any] = {}
        if kinds:
            step = max(index.steps.get(place.name, 0) for place in together)
            remembered = make_states(deepspeed, holder, kinds, step)
        for place in together:
            for kind, values in _tensors(place, remembered):
                stored = index.fragments.get(place.name, {}).get(kind, ())
                _fill(place, values, stored, opened)


def _tensors(place: Place, remembered: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The kinds of a place, with the tensors that hold them."""
    yield WEIGHT, place.holder
    for kind, values in remembered.items():
        if kind != STEP and torch.is_tensor(values):
            yield kind, values


def _fill(
    place: Place, values: Tensor, fragments: Sequence[Fragment], opened: dict[Path, Any]
) -> None:
    """Bring the stored elements of a place together. A parameter without states keeps zeros."""
    parts = []
    for fragment in fragments:
        first = max(fragment.start, place.start)
        end = min(fragment.end, place.start + place.length)
        if first < end:
            if fragment.file not in opened:
                opened[fragment.file] = safe_open(fragment.file, framework="pt")
            stored = opened[fragment.file].get_slice(fragment.key)
            parts.append(stored[first - fragment.start : end - fragment.start])
    if parts:
        place.write(values, torch.cat(parts))

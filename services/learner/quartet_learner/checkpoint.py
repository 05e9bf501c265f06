"""Checkpoints: everything that an exact continuation needs, whole or not there.

    <folder>/<tag>/            DeepSpeed's files: weights, optimizer, schedule
    <folder>/<tag>/rng_<r>.safetensors    random state of rank r
    <folder>/<tag>/ema.safetensors        the averaged weights, where the run has them
    <folder>/<tag>/run.binpb              the run's StartRunRequest
    <folder>/<tag>/trainer_state.bin      bytes of the trainer
    <folder>/<tag>/checkpoint.json        steps, ranks, and size and CRC-32 of every file
    <folder>/latest                       the tag written last

A checkpoint is written aside, made durable, renamed, and only then named in `latest`.
"""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from quartet import codec
from quartet.api.learner.v1 import learner_service_pb2 as pb
from quartet.errors import RequestError
from quartet.types import RunSpec
from quartet.types.requests import SavedFolder
from quartet_learner import files
from quartet_learner.ema import MovingAverage
from quartet_learner.group import RankGroup

log = logging.getLogger(__name__)

FACTS = "checkpoint.json"
RUN = "run.binpb"
TRAINER_STATE = "trainer_state.bin"
LATEST = "latest"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """A checkpoint found on disk, whole."""

    path: Path
    spec: RunSpec
    optimizer_steps: int
    trainer_state: bytes


def save(
    deepspeed: Any,
    group: RankGroup,
    spec: RunSpec,
    optimizer_steps: int,
    folder: Path,
    tag: str,
    trainer_state: bytes,
    *,
    average: MovingAverage | None = None,
) -> SavedFolder:
    """Write `<folder>/<tag>`. Collective; all ranks must see the same disk.

    The same run may write it again at the same step: one that was killed before all its learners
    had saved goes on from an older checkpoint and comes by here a second time.

    Raises:
        RequestError: there is a checkpoint of that name, of another run or step.
        InfraError: the disk refused, here or on another rank.
    """
    target, aside = folder / tag, folder / f".{tag}.tmp"
    if target.exists() and not _same_moment(target, spec, optimizer_steps):
        raise RequestError(
            f"there is a checkpoint {tag} in {folder}",
            reason="CHECKPOINT_EXISTS",
            field="tag",
            value=tag,
            remedy="use a new tag",
        )
    inside = aside / tag

    def prepare() -> None:
        if group.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
            inside.mkdir(parents=True)

    def write() -> None:
        deepspeed.save_checkpoint(str(aside), tag=tag, save_latest=False)
        save_file(_random_state(), inside / f"rng_{group.rank}.safetensors")
        if average is not None:
            average.save(inside)

    def seal() -> None:
        if group.rank == 0:
            _seal(inside, group, deepspeed, spec, optimizer_steps, trainer_state)
            files.put_in_place(inside, target)
            files.write_atomically(folder / LATEST, tag)

    try:
        for phase in (prepare, write, seal):
            error: Exception | None = None
            try:
                phase()
            except (OSError, RuntimeError, SafetensorError) as caught:
                error = caught
            group.agree(f"writing checkpoint {tag} in {folder}", error)
    finally:
        if group.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
    return SavedFolder(path=str(target), size_bytes=files.size_of(target))


def resolve(folder: Path, tag: str) -> str:
    """The tag of a whole checkpoint: `tag`, verified, or for an empty one the latest whole one.

    Reads every byte; rank 0 does it for all.

    Raises:
        RequestError: there is none, or it is damaged.
    """
    if not tag:
        return _latest_whole(folder)
    facts = _facts(folder / tag)
    if facts is None:
        raise _not_there(f"there is no checkpoint {tag} in {folder}", tag)
    if damage := files.first_damage(folder / tag, facts["files"]):
        raise _not_there(f"checkpoint {tag} is damaged: {damage}", tag)
    return tag


def describe(folder: Path, tag: str, world_size: int) -> Stored:
    """What a checkpoint holds, beside DeepSpeed's files.

    Raises:
        RequestError: it belongs to another number of ranks.
    """
    path = folder / tag
    facts = files.read_json(path / FACTS)
    if facts["world_size"] != world_size:
        raise RequestError(
            f"checkpoint {tag} is of {facts['world_size']} ranks, the learner has {world_size}",
            reason="CHECKPOINT_OF_OTHER_WORLD_SIZE",
            field="learner.num_ranks",
            value=str(world_size),
            remedy=f"start the learner with --learner.num_ranks {facts['world_size']}",
        )
    request = pb.StartRunRequest.FromString((path / RUN).read_bytes())
    return Stored(
        path=path,
        spec=codec.decode_run_spec(request),
        optimizer_steps=facts["optimizer_steps"],
        trainer_state=(path / TRAINER_STATE).read_bytes(),
    )


def load(
    deepspeed: Any, group: RankGroup, stored: Stored, *, average: MovingAverage | None = None
) -> None:
    """Bring the engine to where the checkpoint was written. Collective.

    Raises:
        RequestError: DeepSpeed cannot read it with the present settings.
    """
    path, _ = deepspeed.load_checkpoint(str(stored.path.parent), tag=stored.path.name)
    if path is None:
        raise _not_there(f"DeepSpeed cannot load checkpoint {stored.path.name}", stored.path.name)
    if average is not None:
        average.load(stored.path)
    state = load_file(stored.path / f"rng_{group.rank}.safetensors")
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _seal(
    inside: Path,
    group: RankGroup,
    deepspeed: Any,
    spec: RunSpec,
    optimizer_steps: int,
    trainer_state: bytes,
) -> None:
    """Write what belongs to all ranks, the inventory last."""
    (inside / RUN).write_bytes(codec.encode_run_spec(spec).SerializeToString())
    (inside / TRAINER_STATE).write_bytes(trainer_state)
    facts = {
        "run_id": spec.run_id,
        "optimizer_steps": optimizer_steps,
        "world_size": group.world_size,
        "zero_stage": deepspeed.zero_optimization_stage(),
        "files": files.inventory(inside),
    }
    (inside / FACTS).write_text(json.dumps(facts, indent=1))


def _same_moment(path: Path, spec: RunSpec, optimizer_steps: int) -> bool:
    """True for a checkpoint of this run at this step."""
    facts = _facts(path) or {}
    return (facts.get("run_id"), facts.get("optimizer_steps")) == (spec.run_id, optimizer_steps)


def _latest_whole(folder: Path) -> str:
    """The tag that `latest` names, or, when that one is damaged, the newest that is whole."""
    found = [(path, facts) for path in folder.glob("*") if (facts := _facts(path)) is not None]
    found.sort(key=lambda pair: (pair[0] / FACTS).stat().st_mtime_ns, reverse=True)
    pointer = folder / LATEST
    named = pointer.read_text().strip() if pointer.is_file() else ""
    found.sort(key=lambda pair: pair[0].name != named)
    for path, facts in found:
        damage = files.first_damage(path, facts["files"])
        if not damage:
            return path.name
        log.warning("checkpoint %s is damaged (%s): trying an older one", path, damage)
    raise _not_there(f"there is no whole checkpoint in {folder}", "")


def _facts(path: Path) -> dict[str, Any] | None:
    try:
        return files.read_json(path / FACTS)
    except (OSError, ValueError):
        return None


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _not_there(problem: str, tag: str) -> RequestError:
    return RequestError(
        problem,
        reason="CHECKPOINT_NOT_FOUND",
        field="tag",
        value=tag,
        remedy="give the folder and tag of a whole checkpoint",
    )

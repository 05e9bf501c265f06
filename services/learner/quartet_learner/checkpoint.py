"""Checkpoints: everything that an exact continuation needs, whole or not there.

    <folder>/<tag>/state_<r>_<n>.safetensors    weights and optimizer's states, what rank r steps
    <folder>/<tag>/counters.json          state of the schedule and of the loss scale
    <folder>/<tag>/rng_<r>.safetensors    random state of rank r
    <folder>/<tag>/ema.safetensors        the averaged weights, where the run has them
    <folder>/<tag>/run.binpb              the run's StartRunRequest
    <folder>/<tag>/trainer_state.bin      bytes of the trainer
    <folder>/<tag>/checkpoint.json        steps, ranks, the trained parameters' shapes, and size and
                                          CRC-32 of every file
    <folder>/latest                       the tag written last

A checkpoint is written aside, made durable, renamed, and only then named in `latest`. Any number
of ranks and any ZeRO stage may go on from it (see fragments.py); as many ranks as wrote it, at the
same stage, go on bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from quartet import codec
from quartet.api.learner.v1 import learner_service_pb2 as pb
from quartet.errors import RequestError
from quartet.types import RunSpec
from quartet.types.requests import SavedFolder
from quartet_learner import files, fragments, training_state
from quartet_learner.ema import FILE as EMA
from quartet_learner.ema import MovingAverage
from quartet_learner.gather import trained_parameters
from quartet_learner.group import RankGroup
from quartet_learner.model import TrainedModel

log = logging.getLogger(__name__)

FORMAT = 2
"""Of the folder. Format 1 was DeepSpeed's own files, which only the same ranks could read."""
FACTS = "checkpoint.json"
COUNTERS = "counters.json"
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
    world_size: int
    """Ranks that wrote it."""
    zero_stage: int
    """The stage that DeepSpeed had been given."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of the trained parameters, by name."""
    adapter_scale: float | None
    """alpha / rank where adapters were trained."""
    base: str | None
    """Of the weights under the adapters, as far as known."""
    tensor_size: int
    """Ranks over which each matrix was spread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """What is saved of a run."""

    model: TrainedModel
    deepspeed: Any
    """deepspeed.DeepSpeedEngine around the model."""
    spec: RunSpec
    optimizer_steps: int
    average: MovingAverage | None


def save(
    moment: Moment, group: RankGroup, folder: Path, tag: str, trainer_state: bytes
) -> SavedFolder:
    """Write `<folder>/<tag>`. Collective; all ranks must see the same disk.

    The same run may write it again at the same step: one that was killed before all its learners
    had saved goes on from an older checkpoint and comes by here a second time.

    Raises:
        RequestError: there is a checkpoint of that name, of another run or step.
        InfraError: the disk refused, here or on another rank.
    """
    target, aside = folder / tag, folder / f".{tag}.tmp"
    if target.exists() and not _same_moment(target, moment):
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
            files.remove_leftovers(folder)
            inside.mkdir(parents=True)

    def write() -> None:
        owned = training_state.places(moment.deepspeed, _trained(moment.model, group))
        if moment.deepspeed.zero_optimization_stage() == 0:
            owned = owned[group.rank :: group.world_size]
        fragments.write_state(moment.deepspeed, owned, inside, group.rank)
        save_file(_random_state(), inside / f"rng_{group.rank}.safetensors")
        if moment.average is not None:
            moment.average.save(inside)

    def seal() -> None:
        if group.rank == 0:
            _seal(inside, group, moment, trainer_state)
            files.put_in_place(inside, target)
            files.write_atomically(folder / LATEST, tag)

    try:
        for phase in (prepare, write, seal):
            _together(phase, group, f"writing checkpoint {tag} in {folder}")
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


def describe(folder: Path, tag: str) -> Stored:
    """What a checkpoint is of. Reads no weights.

    Raises:
        RequestError: another release wrote it.
    """
    path = folder / tag
    facts = files.read_json(path / FACTS)
    if facts.get("format") != FORMAT:
        raise RequestError(
            f"checkpoint {tag} has format {facts.get('format', 1)}, this release reads {FORMAT}",
            reason="CHECKPOINT_OF_OTHER_FORMAT",
            field="tag",
            value=tag,
            remedy="go on with the release that wrote it, or train on from an exported model",
        )
    request = pb.StartRunRequest.FromString((path / RUN).read_bytes())
    return Stored(
        path=path,
        spec=codec.decode_run_spec(request),
        optimizer_steps=facts["optimizer_steps"],
        trainer_state=(path / TRAINER_STATE).read_bytes(),
        world_size=facts["world_size"],
        zero_stage=facts["zero_stage"],
        shapes={name: tuple(shape) for name, shape in facts["parameters"].items()},
        adapter_scale=facts.get("adapter_scale"),
        base=facts.get("base"),
        tensor_size=facts["tensor_size"],
    )


def check_fits(stored: Stored, model: TrainedModel, group: RankGroup) -> None:
    """See that a checkpoint is of this model, and that nothing of it is missing.

    Raises:
        RequestError: it is not, with the first parameter that says so.
    """
    if stored.tensor_size != group.layout.tensor_size:
        raise RequestError(
            f"checkpoint {stored.path.name} is of matrices spread over {stored.tensor_size} ranks",
            reason="CHECKPOINT_OF_OTHER_TENSOR_SIZE",
            field="ds.tensor_parallel_size",
            value=str(group.layout.tensor_size),
            remedy=f"start the learner with --ds.tensor_parallel_size {stored.tensor_size}",
        )
    ours = _shapes(model, group)
    if stored.tensor_size > 1:
        # Before a run begins matrices are whole here; only their names can be compared.
        ours = {name: stored.shapes.get(name, shape) for name, shape in ours.items()}
    for name in (*ours, *stored.shapes):
        if ours.get(name) != stored.shapes.get(name):
            raise RequestError(
                f"checkpoint {stored.path.name} is of another model: {name} has "
                f"{_said(stored.shapes.get(name))} there and {_said(ours.get(name))} here",
                reason="CHECKPOINT_OF_OTHER_MODEL",
                field="tag",
                value=stored.path.name,
                remedy="start the learner with the model, head and adapters that were saved",
            )
    if stored.adapter_scale != model.adapter_scale:
        raise RequestError(
            f"checkpoint {stored.path.name} is of adapters scaled by {stored.adapter_scale}, "
            f"those here are scaled by {model.adapter_scale}",
            reason="CHECKPOINT_OF_OTHER_MODEL",
            field="ds.lora.alpha",
            value=stored.path.name,
            remedy="give the --ds.lora.alpha of the run that was saved",
        )
    if None not in (stored.base, model.base) and stored.base != model.base:
        raise RequestError(
            f"checkpoint {stored.path.name} is of adapters on other weights than those here",
            reason="CHECKPOINT_OF_OTHER_MODEL",
            field="learner.model_name_or_path",
            value=stored.path.name,
            remedy="start the learner with the model that the run began with",
        )
    index = fragments.read_index(stored.path)
    average_there = stored.spec.ema_beta is None or (stored.path / EMA).is_file()
    if gap := index.first_gap(stored.shapes) or ("" if average_there else EMA):
        raise _not_there(f"checkpoint {stored.path.name} lacks {gap}", stored.path.name)


def load(
    model: TrainedModel,
    deepspeed: Any,
    group: RankGroup,
    stored: Stored,
    *,
    average: MovingAverage | None = None,
) -> None:
    """Bring an engine that has just begun to where the checkpoint was written. Collective.

    Raises:
        InfraError: a file cannot be read, here or on another rank. The engine is of no use then.
    """
    shape = (group.world_size, deepspeed.zero_optimization_stage())
    same = shape == (stored.world_size, stored.zero_stage)
    if not same and group.rank == 0:
        log.info(
            "checkpoint %s was written by %d ranks with ZeRO stage %d; going on with %d and %d",
            *(stored.path.name, stored.world_size, stored.zero_stage, *shape),
        )

    def read() -> None:
        wanted = training_state.places(deepspeed, _trained(model, group))
        fragments.read_state(deepspeed, wanted, fragments.read_index(stored.path))
        training_state.set_counters(deepspeed, files.read_json(stored.path / COUNTERS))
        if average is not None:
            average.load(stored.path)

    what = f"loading checkpoint {stored.path.name}"
    _together(read, group, what)
    training_state.publish(deepspeed)
    _together(lambda: _set_random_state(stored, group), group, what)


def _together(phase: Callable[[], None], group: RankGroup, what: str) -> None:
    """Run one phase on all ranks; a failure of one is a failure of all."""
    error: Exception | None = None
    try:
        phase()
    except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as caught:
        error = caught
    group.agree(what, error)


def _seal(inside: Path, group: RankGroup, moment: Moment, trainer_state: bytes) -> None:
    """Write what belongs to all ranks, the inventory last."""
    (inside / RUN).write_bytes(codec.encode_run_spec(moment.spec).SerializeToString())
    (inside / TRAINER_STATE).write_bytes(trainer_state)
    counters = training_state.counters(moment.deepspeed)
    (inside / COUNTERS).write_text(json.dumps(counters, indent=1))
    facts = {
        "format": FORMAT,
        "run_id": moment.spec.run_id,
        "optimizer_steps": moment.optimizer_steps,
        "world_size": group.world_size,
        "zero_stage": moment.deepspeed.zero_optimization_stage(),
        "tensor_size": group.layout.tensor_size,
        "parameters": _shapes(moment.model, group),
        "adapter_scale": moment.model.adapter_scale,
        "base": moment.model.base,
        "files": files.inventory(inside),
    }
    (inside / FACTS).write_text(json.dumps(facts, indent=1))


def _trained(model: TrainedModel, group: RankGroup) -> dict[str, nn.Parameter]:
    """The trained parameters by the names they have on disk: a part of a matrix says which."""
    named = trained_parameters(model.hf)
    size = group.layout.tensor_size
    if size == 1:
        return named
    return {f"{name}@{group.rank % size}/{size}": p for name, p in named.items()}


def _shapes(model: TrainedModel, group: RankGroup) -> dict[str, tuple[int, ...]]:
    """Of this rank's trained parameters, by name."""
    named = _trained(model, group)
    return {name: training_state.size_of(parameter) for name, parameter in named.items()}


def _said(shape: tuple[int, ...] | None) -> str:
    return "no place" if shape is None else f"shape {list(shape)}"


def _same_moment(path: Path, moment: Moment) -> bool:
    """True for a checkpoint of this run at this step."""
    facts = _facts(path) or {}
    return (facts.get("run_id"), facts.get("optimizer_steps")) == (
        moment.spec.run_id,
        moment.optimizer_steps,
    )


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


def _set_random_state(stored: Stored, group: RankGroup) -> None:
    """Take this rank's random state, or, where none of its number wrote one, a seed of its own."""
    file = stored.path / f"rng_{group.rank}.safetensors"
    if not file.is_file():
        origin = f"{stored.spec.seed}/{stored.optimizer_steps}/{group.rank}"
        digest = hashlib.sha256(origin.encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return
    state = load_file(file)
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _not_there(problem: str, tag: str) -> RequestError:
    return RequestError(
        problem,
        reason="CHECKPOINT_NOT_FOUND",
        field="tag",
        value=tag,
        remedy="give the folder and tag of a whole checkpoint",
    )

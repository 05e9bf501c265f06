"""Whole weights out of the training engine: for pushes and for exported models."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from quartet.errors import FatalError
from quartet.types import WeightManifest
from quartet.types.requests import SavedFolder
from quartet.weights import Bucket, PushClock, flat_tensor, pack_bucket, plan_buckets
from quartet_learner import files
from quartet_learner.adapter import ADAPTER_FOLDER, adapter_state, write_adapter
from quartet_learner.gather import is_cut, visit_items, whole
from quartet_learner.group import RankGroup
from quartet_learner.model import TrainedModel
from quartet_learner.quantize import written_unquantised
from quartet_learner.served import ServedTensor, plain_name, served_tensors, unique

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)


def buckets(
    model: TrainedModel, manifest: WeightManifest, clock: PushClock | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Yield (bucket index, flat buffer) for every bucket of `manifest`, in order. Collective.

    The tensors are those of the model without adapters, merged where it has some (see served.py).
    Under ZeRO-3 each bucket's parameters are gathered by all ranks first, so all ranks iterate to
    the end. A buffer is good until the next but one is asked for: the next is filled while it is
    sent.

    Args:
        model: what is trained.
        manifest: which tensors, cut into which buckets.
        clock: learns how long gathers and packing take.

    Raises:
        FatalError: after the last bucket, when a weight is not finite: nobody may serve them.
    """
    clock = clock or PushClock()
    served = {tensor.name: tensor for tensor in served_tensors(model.hf)}
    buffers = _Buffers()
    finite = _FiniteCheck()
    for bucket in plan_buckets(manifest):
        wanted = [served[slot.name] for slot in bucket.tensors]
        with contextlib.ExitStack() as gathered, torch.no_grad():
            with clock.measure("gather"):
                gathered.enter_context(whole(p for tensor in wanted for p in tensor.parameters))
            with clock.measure("pack"):
                values = {tensor.name: tensor.value() for tensor in wanted}
                if len(wanted) == 1 and not any(map(is_cut, wanted[0].parameters)):
                    flat = flat_tensor(bucket, values[wanted[0].name])
                else:
                    flat = buffers.fill(bucket, values)
                finite.look_at(bucket, flat)
            with clock.measure("gather"):
                gathered.close()
        yield bucket.index, flat
    finite.end()


class _Buffers:
    """Two send buffers a dtype, filled in turn."""

    def __init__(self) -> None:
        self._next: dict[torch.dtype, list[Tensor | None]] = {}

    def fill(self, bucket: Bucket, values: Mapping[str, Tensor]) -> Tensor:
        """Pack a bucket into the buffer whose turn it is, or into a larger one in its place."""
        dtype = values[bucket.tensors[0].name].dtype
        pair = self._next.setdefault(dtype, [None, None])
        buffer = pair.pop(0)
        fits = buffer is not None and len(buffer) >= bucket.numel
        flat = pack_bucket(bucket, values, out=buffer if fits else None)
        pair.append(buffer if fits else flat)
        return flat


class _FiniteCheck:
    """Finds weights that are not finite, without waiting for a GPU before all are there."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._extremes: list[Tensor] = []

    def look_at(self, bucket: Bucket, flat: Tensor) -> None:
        """Note the least and the greatest: NaN where there is one. Ten times as fast as asking."""
        if bucket.numel:
            self._names.append(bucket.tensors[0].name)
            self._extremes.append(torch.stack(torch.aminmax(flat)).double())

    def end(self) -> None:
        """Raise FatalError for the first bucket with a weight that is not finite."""
        if not self._names:
            return
        good = torch.isfinite(torch.stack(self._extremes)).all(dim=1).tolist()
        if not all(good):
            first = self._names[good.index(False)]
            raise _not_finite(f"in the bucket that begins with {first}")


def export(
    model: TrainedModel,
    group: RankGroup,
    source: str,
    folder: Path,
    config_values: Mapping[str, float],
    averaged: Mapping[str, Tensor] | None = None,
) -> SavedFolder:
    """Write a folder that `from_pretrained` opens, aside and then renamed. Collective.

    Args:
        model: what is trained.
        group: all ranks; rank 0 writes.
        source: where the model came from; its tokenizer goes along.
        folder: created, or replaced as a whole.
        config_values: numbers stored in config.json beside the model's own.
        averaged: whole tensors by name that take the place of the trained ones (see ema.py).

    With adapters the folder holds the merged model, and `adapter/` inside it the adapter alone in
    peft's own format.

    Raises:
        InfraError: the disk refused.
        FatalError: a weight is not finite.
    """
    state = _state_on_rank_0(model, group, averaged or {})
    adapter = adapter_state(model, group, averaged or {}) if model.adapter_config else None
    error: Exception | None = None
    if group.rank == 0:
        try:
            _check_finite(state)
            aside = files.aside_of(folder)
            try:
                _write_model(model, state, aside, config_values)
                copy_tokenizer(source, aside)
                if adapter is not None:
                    write_adapter(model, adapter, aside / ADAPTER_FOLDER, config_values)
                files.put_in_place(aside, folder)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
        except (OSError, SafetensorError, FatalError) as caught:
            error = caught
    group.agree(f"writing the model to {folder}", error)
    return SavedFolder(path=str(folder), size_bytes=files.size_of(folder))


def copy_tokenizer(source: str, target: Path) -> None:
    """Copy the tokenizer's files of a local folder, or save the tokenizer of a hub name."""
    folder = Path(source)
    if folder.is_dir():
        for name in TOKENIZER_FILES:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, target / name)
        return
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(source).save_pretrained(target)


def _state_on_rank_0(
    model: TrainedModel, group: RankGroup, averaged: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Served tensors by name, on the CPU of rank 0; empty elsewhere. Tied names share a tensor."""
    served = served_tensors(model.hf)
    copies: dict[int, Tensor] = {}

    def copy(tensor: ServedTensor) -> None:
        copies[id(tensor.parameter)] = tensor.value(averaged).to("cpu", copy=True).contiguous()

    visit_items(unique(served), lambda tensor: tensor.parameters, group, copy)
    if group.rank != 0:
        return {}
    state = {tensor.name: copies[id(tensor.parameter)] for tensor in served}
    persistent = set(model.hf.state_dict())
    for name, buffer in model.hf.named_buffers():
        if name in persistent:
            state[plain_name(name)] = buffer.detach().cpu()
    return state


def _write_model(
    model: TrainedModel,
    state: dict[str, Tensor],
    folder: Path,
    config_values: Mapping[str, float],
) -> None:
    """Write config and safetensors; a scalar head under the name that its config says."""
    config = model.hf.config
    before = {name: getattr(config, name, None) for name in config_values}
    use_cache = config.use_cache
    for name, value in config_values.items():
        setattr(config, name, value)
    config.use_cache = True
    try:
        with written_unquantised(model.hf):
            model.hf.save_pretrained(folder, state_dict=state, safe_serialization=True)
    finally:
        config.use_cache = use_cache
        for name, value in before.items():
            if value is None:
                delattr(config, name)
            else:
                setattr(config, name, value)
    prefix = getattr(config, "value_head_prefix", "score")
    if model.scorer is None and prefix != "score":
        _rename_head(folder, prefix)


def _rename_head(folder: Path, prefix: str) -> None:
    """Give the tensor `score.weight` of a written folder the name `<prefix>.weight`."""
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        table = json.loads(index.read_text())
        names = [table["weight_map"]["score.weight"]]
        table["weight_map"][f"{prefix}.weight"] = table["weight_map"].pop("score.weight")
        index.write_text(json.dumps(table, indent=2))
    tensors = load_file(folder / names[0])
    tensors[f"{prefix}.weight"] = tensors.pop("score.weight")
    save_file(tensors, folder / names[0], metadata={"format": "pt"})


def _check_finite(state: Mapping[str, Tensor]) -> None:
    for name, tensor in state.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise _not_finite(f"in {name}")


def _not_finite(where: str) -> FatalError:
    return FatalError(
        f"the weights are not finite {where}",
        reason="WEIGHTS_NOT_FINITE",
        remedy="load the last checkpoint, and lower the learning rate",
    )

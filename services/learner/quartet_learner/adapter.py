"""The adapter alone, in peft's own format: what `PeftModel.from_pretrained` and engines read.

adapter_config.json          peft's LoraConfig
adapter_model.safetensors    A and B of every adapted layer, and the scalar head where there is one
model_config.json            what the config of the merged model says beyond that of the base model
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn

from quartet_learner.gather import trained_parameters, visit_whole
from quartet_learner.group import RankGroup
from quartet_learner.lora import ADAPTER
from quartet_learner.model import TrainedModel

ADAPTER_FOLDER = "adapter"
CONFIG_FILE = "model_config.json"
"""Read by `quartet tools merge-lora`; peft and engines pass it over."""


def adapter_state(
    model: TrainedModel, group: RankGroup, averaged: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Everything that is trained, by peft's names, on the CPU of rank 0. Collective.

    Args:
        model: with adapters.
        group: all ranks.
        averaged: whole tensors by name that take the place of the trained ones.
    """
    names = {id(parameter): name for name, parameter in trained_parameters(model.hf).items()}
    state: dict[str, Tensor] = {}

    def copy(parameter: nn.Parameter, whole: Tensor) -> None:
        name = names[id(parameter)]
        value = averaged.get(name, whole).to("cpu", parameter.dtype, copy=True)
        state[f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}"] = value.contiguous()

    visit_whole(trained_parameters(model.hf).values(), group, copy)
    return state


def write_adapter(
    model: TrainedModel,
    state: dict[str, Tensor],
    folder: Path,
    config_values: Mapping[str, float],
) -> None:
    """Write what `adapter_state` gathered.

    Args:
        model: with adapters.
        state: of rank 0.
        folder: to make.
        config_values: numbers stored in the merged model's config.
    """
    folder.mkdir()
    model.adapter_config.save_pretrained(folder)
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config: dict[str, float | str | int] = dict(config_values)
    if model.scorer is None:
        config |= {"value_head_prefix": model.hf.config.value_head_prefix, "num_labels": 1}
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")

"""Low-rank adapters (arXiv:2106.09685), made by the library peft.

A linear layer W [out, in] gets two trained matrices, A [rank, in] and B [out, rank], and computes
W x + alpha / rank * B A dropout(x). W is frozen. B begins at zero, so training begins exactly at
the model as it was loaded. Only linear layers inside the model are adapted: a scalar head is
trained whole, because a new one has nothing to adapt, and the head of a language model stays.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from quartet.errors import ConfigError
from quartet.types import Head
from quartet_learner.settings import ALL_LINEAR, LearnerSettings

ADAPTER = "default"
"""peft's name of the one adapter."""
DIGEST_ELEMENTS = 4096
"""Of each frozen tensor, from its beginning, that tell a model from another."""
SCALAR_HEAD = "score"
"""transformers' name of the head of a sequence classifier."""


def add_adapters(hf: Any, settings: LearnerSettings) -> Any:
    """Freeze the model and put adapters into it, in place.

    Args:
        hf: transformers model with its head.
        settings: rank, alpha, dropout and targets.

    Returns:
        peft's LoraConfig of what was done.

    Raises:
        ConfigError: a target that the model does not have, or the package peft is missing.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(
            "adapters need the package peft",
            field="ds.lora.rank",
            value=str(settings.lora_rank),
            remedy="pip install 'quartet-rlhf[learner]'",
        ) from error
    lm = settings.head is Head.LM
    config = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=target_modules(hf, settings.lora_targets),
        bias="none",
        task_type="CAUSAL_LM" if lm else "SEQ_CLS",
        base_model_name_or_path=settings.model_name_or_path,
    )
    inject_adapter_in_model(config, hf, ADAPTER)
    if not lm:
        head: nn.Linear = getattr(hf, SCALAR_HEAD)
        head.requires_grad_(True)
        config.modules_to_save = [SCALAR_HEAD]
    return config


def adapted_layers(hf: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and peft layer of every adapted module; needs no peft where there is none."""
    for name, module in hf.named_modules():
        if hasattr(module, "base_layer") and hasattr(module, "lora_A"):
            yield name, module


def base_digest(hf: nn.Module) -> str:
    """What tells the frozen weights under adapters from those of another model.

    They are not in a checkpoint, and adapters on others than those they were trained on are
    nonsense that nothing else would show. Taken of bf16 values, so that --ds.param_dtype is free.
    """
    digest = 0
    for parameter in hf.parameters():
        if not parameter.requires_grad:
            head = parameter.detach().flatten()[:DIGEST_ELEMENTS].to("cpu", torch.bfloat16)
            digest = zlib.crc32(head.view(torch.uint8).numpy().tobytes(), digest)
    return f"{digest:08x}"


def reset_adapters(hf: nn.Module, seed: int) -> None:
    """Draw the adapters' weights as peft does, from a seed: the same on every rank, B = 0."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for _, layer in adapted_layers(hf):
            layer.reset_lora_parameters(ADAPTER, True)


def target_modules(hf: Any, wanted: Sequence[str]) -> list[str]:
    """Names for peft's `target_modules`, which matches them at the end of a module's name.

    Raises:
        ConfigError: a name that no linear layer of the model has.
    """
    known = _linear_layers(hf)
    if tuple(wanted) == (ALL_LINEAR,):
        return _shortest(known, hf)
    unknown = [word for word in wanted if not any(_matches(name, word) for name in known)]
    if unknown or not wanted:
        endings = sorted({name.rpartition(".")[2] for name in known})
        raise ConfigError(
            f"the model has no linear layer {', '.join(unknown)} that an adapter could go to",
            field="ds.lora.target_modules",
            value=" ".join(wanted),
            remedy=f"there are {', '.join(endings)}; {ALL_LINEAR} takes all of them",
        )
    chosen = [name for name in known if any(_matches(name, word) for word in wanted)]
    return _shortest(chosen, hf)


def _linear_layers(hf: Any) -> list[str]:
    """Full names of the layers that can have an adapter: linear, and no head."""
    from transformers.pytorch_utils import Conv1D

    heads = {id(hf.get_output_embeddings()), id(getattr(hf, SCALAR_HEAD, None))}
    return [
        name
        for name, module in hf.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and id(module) not in heads
    ]


def _shortest(chosen: Sequence[str], hf: Any) -> list[str]:
    """Last parts of the names where these mean the same layers: engines read them easier."""
    endings = sorted({name.rpartition(".")[2] for name in chosen})
    everything = [name for name, _ in hf.named_modules()]
    meant = {name for name in everything if any(_matches(name, end) for end in endings)}
    return endings if meant == set(chosen) else sorted(chosen)


def _matches(name: str, word: str) -> bool:
    return name == word or name.endswith(f".{word}")

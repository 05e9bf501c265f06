"""Weights in 4 bits (NF4, arXiv:2305.14314) under adapters, by the library bitsandbytes.

The frozen matrices take a quarter of the memory and are expanded layer by layer as they are used.
What leaves the learner is never quantised: pushes and exports carry expanded, merged weights.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quartet.errors import ConfigError
from quartet_learner.lora import SCALAR_HEAD
from quartet_learner.settings import LearnerSettings

KEPT_WHOLE = ("lm_head", SCALAR_HEAD)
"""Layers that are not quantised: heads are small or tied, and a scalar one is trained."""


def loading_options(settings: LearnerSettings) -> dict[str, Any]:
    """Arguments of `from_pretrained` for quantised weights; none where they are not wanted.

    Raises:
        ConfigError: this machine cannot compute with them.
    """
    if not settings.load_in_4bit:
        return {}
    check_machine()
    from transformers import BitsAndBytesConfig

    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=getattr(torch, settings.param_dtype),
            llm_int8_skip_modules=list(KEPT_WHOLE),
        ),
        "device_map": {"": torch.cuda.current_device()},
    }


def check_machine() -> None:
    """Raise ConfigError without a GPU or without bitsandbytes."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "weights in 4 bits need a GPU, and torch sees none",
            field="ds.load_in_4bit",
            value="true",
            remedy="leave the flag away; --ds.lora.rank works without it",
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            "weights in 4 bits need the package bitsandbytes",
            field="ds.load_in_4bit",
            value="true",
            remedy="pip install bitsandbytes, or leave the flag away",
        )


def quantised_form(parameter: nn.Parameter) -> tuple[torch.Size, torch.dtype] | None:
    """Shape and type of a quantised parameter once it is expanded; None for any other."""
    state = getattr(parameter, "quant_state", None)
    return None if state is None else (state.shape, state.dtype)


def dequantized(parameter: nn.Parameter) -> Tensor:
    """The parameter's values: expanded when it is quantised, else its own memory."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return parameter.detach()
    # Only machines with a GPU have the package.
    from bitsandbytes.functional import dequantize_4bit  # pyright: ignore[reportMissingImports]

    return dequantize_4bit(parameter.data, state)


@contextmanager
def written_unquantised(hf: Any) -> Iterator[None]:
    """Inside, `save_pretrained` describes and writes the expanded weights that it is given."""
    taken = [
        (owner, name, getattr(owner, name))
        for owner, name in (
            (hf, "hf_quantizer"),
            (hf, "_weight_conversions"),
            (hf.config, "quantization_config"),
        )
        if "quantization_config" in vars(hf.config) and name in vars(owner)
    ]
    for owner, name, _ in taken:
        delattr(owner, name)
    try:
        yield
    finally:
        for owner, name, value in taken:
            setattr(owner, name, value)

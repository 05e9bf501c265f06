"""How a frozen transformers model is loaded: device, dtype, attention kernels.

torch and transformers are imported inside the functions.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING, Any

from quartet.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from quartet.config.ds import LoadConfig

logger = logging.getLogger(__name__)

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_FLASH_PACKAGES = {
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface",
}
"""transformers' names of flash attention, and what has to be installed for them."""


def pick_device() -> torch.device:
    """The first visible GPU, or the CPU."""
    import torch

    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def load_arguments(config: LoadConfig, device: torch.device) -> dict[str, Any]:
    """Keyword arguments of `from_pretrained` for a model that is only read.

    Raises:
        ConfigError: a setting that only training has a use for.
    """
    import torch

    if config.load_in_4bit:
        raise ConfigError(
            "ds.load_in_4bit is for adapters on a quantised model, and this service trains nothing",
            field="ds.load_in_4bit",
            remedy="leave it out",
        )
    arguments: dict[str, Any] = {
        "dtype": getattr(torch, _DTYPES[config.param_dtype]),
        "attn_implementation": attention_kernels(config.attn_implementation, device),
        "trust_remote_code": config.trust_remote_code,
    }
    if config.experts_implementation is not None:
        arguments["experts_implementation"] = config.experts_implementation
    return arguments


def attention_kernels(wanted: str, device: torch.device) -> str:
    """`wanted`, or sdpa where flash attention cannot run; says so when it changes it."""
    if not wanted.startswith("flash_attention"):
        return wanted
    package = _FLASH_PACKAGES.get(wanted, "flash_attn")
    if device.type == "cuda" and importlib.util.find_spec(package) is not None:
        return wanted
    missing = "there is no GPU" if device.type != "cuda" else f"{package} is not installed"
    logger.info("attention: sdpa in place of %s, because %s", wanted, missing)
    return "sdpa"


def loading_error(error: Exception, name_or_path: str, field: str) -> ConfigError:
    """One line for the user of what `from_pretrained` said in many."""
    lines = str(error).strip().splitlines()
    return ConfigError(
        f"cannot load a model from {name_or_path!r}: {lines[0] if lines else type(error).__name__}",
        reason="MODEL_NOT_LOADED",
        field=field,
        value=name_or_path,
        remedy="give a folder with config.json and safetensors, or a hub id in reach",
    )

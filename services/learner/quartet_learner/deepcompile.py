"""DeepCompile: DeepSpeed's passes over the graphs of torch.compile, for ZeRO 1 to 3 on a GPU."""

from __future__ import annotations

from typing import Any

from quartet.errors import ConfigError
from quartet_learner.settings import LearnerSettings

FIELD = "ds.deepcompile"


def deepspeed_section(settings: LearnerSettings) -> dict[str, Any]:
    """The part of DeepSpeed's configuration that turns it on; empty without it."""
    return {"compile": {"deepcompile": True}} if settings.deepcompile else {}


def check_device() -> None:
    """Raise ConfigError where DeepSpeed has no passes; it would go on without a word.

    What the settings must be for it is checked before (`quartet.config.checks.kernels`).
    """
    from deepspeed.compile.util import is_deepcompile_supported

    if not is_deepcompile_supported():
        raise ConfigError(
            "DeepSpeed's compiler needs a GPU and torch 2.6",
            field=FIELD,
            remedy="leave the flag away",
        )


def compile_engine(deepspeed: Any, settings: LearnerSettings) -> None:
    """Compile the model inside an engine, if the settings say so; before its first pass."""
    if settings.deepcompile:
        deepspeed.compile()

"""Moves what training needs off the device, and back."""

from __future__ import annotations

from typing import Any

import torch

from quartet.errors import RequestError

SLEEPING_STAGES = (0, 1, 2)


def can_sleep(zero_stage: int) -> bool:
    """Whether the learner can leave its device with this ZeRO stage."""
    return zero_stage in SLEEPING_STAGES


def check_can_sleep(zero_stage: int) -> None:
    """Raise RequestError for a ZeRO stage whose states DeepSpeed cannot move."""
    if not can_sleep(zero_stage):
        raise RequestError(
            "DeepSpeed moves the states of ZeRO-3 for its own FusedAdam only",
            reason="SLEEP_UNSUPPORTED",
            field="ds.zero_stage",
            value=str(zero_stage),
            remedy="use --ds.zero_stage 2, or leave --ds.enable_sleep off",
        )


def sleep(deepspeed: Any) -> None:
    """Move weights, gradients and optimizer states to main memory."""
    if deepspeed.zero_optimization_stage() == 0:
        _move(deepspeed, torch.device("cpu"))
    else:
        deepspeed.offload_states(pin_memory=torch.cuda.is_available())
        _move_frozen(deepspeed, torch.device("cpu"))
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def wake(deepspeed: Any) -> None:
    """Move back what `sleep` moved away."""
    if deepspeed.zero_optimization_stage() == 0:
        _move(deepspeed, deepspeed.device)
    else:
        _move_frozen(deepspeed, deepspeed.device)
        deepspeed.reload_states()


def _move_frozen(deepspeed: Any, device: torch.device) -> None:
    """Weights under adapters: no optimizer holds them, so DeepSpeed leaves them where they are."""
    for parameter in deepspeed.module.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(device)


def _move(deepspeed: Any, device: torch.device) -> None:
    """Stage 0: DeepSpeed has no method for it, so move the model and the optimizer's tensors."""
    deepspeed.module.to(device)
    for part in getattr(deepspeed.optimizer, "parts", (deepspeed.optimizer,)):
        for state in part.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.ndim > 0:
                    state[name] = value.to(device)

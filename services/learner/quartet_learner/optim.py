"""Optimizer, schedule, and the configuration of DeepSpeed."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quartet.errors import ConfigError
from quartet.types import MuonConfig, OptimizerConfig, RunSpec, ScheduleConfig
from quartet_learner.model import TrainedModel
from quartet_learner.muon import build_muon
from quartet_learner.settings import LearnerSettings

log = logging.getLogger(__name__)

STALE_LOCK_SECONDS = 1800.0


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]], weight_decay: float
) -> list[dict[str, Any]]:
    """Two groups: matrices decay, vectors (biases and the weights of norms) do not."""
    decayed: list[nn.Parameter] = []
    exempt: list[nn.Parameter] = []
    for _, parameter in named:
        if parameter.requires_grad:
            shape = getattr(parameter, "ds_shape", parameter.shape)
            (decayed if len(shape) > 1 else exempt).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": exempt, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(
    model: TrainedModel, config: OptimizerConfig, settings: LearnerSettings
) -> torch.optim.Optimizer:
    """AdamW: torch's fused kernels, which need no compiler, or DeepSpeed's on the CPU; or Muon."""
    groups = parameter_groups(model.named_parameters(), config.weight_decay)
    if config.type == "muon":
        return build_muon(model.hf, config, config.muon or MuonConfig(), groups)
    if offloads(settings):
        return _build_cpu_adam(config, groups)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def offloads(settings: LearnerSettings) -> bool:
    """Whether the optimizer is to live elsewhere than the weights.

    A learner that trains on the CPU has it in main memory as it is. There the flag would only
    exchange torch's fused AdamW for one that has to be compiled.
    """
    return settings.adam_offload and torch.cuda.is_available()


def _build_cpu_adam(config: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """DeepSpeed's AdamW for the CPU; the first one on a machine is compiled, in minutes."""
    from deepspeed.git_version_info import installed_ops
    from torch.utils.cpp_extension import get_default_build_root

    remove_stale_build_locks()
    # torch looks for ninja, which came with this interpreter, where the shell would.
    beside = str(Path(sys.executable).parent)
    if beside not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join((beside, os.environ.get("PATH", os.defpath)))
    root = Path(get_default_build_root())
    if not installed_ops.get("cpu_adam") and not any(root.glob("*/cpu_adam/cpu_adam*.so")):
        log.warning(
            "compiling DeepSpeed's AdamW for the CPU: about four minutes of one core, once; "
            "it is kept in %s",
            root,
        )
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(
        groups, lr=config.lr, betas=config.betas, eps=config.eps, adamw_mode=True
    )


def build_schedule(optimizer: torch.optim.Optimizer, config: ScheduleConfig) -> Any:
    """The schedule `config.name` of transformers, stepped once an optimizer step.

    A run that goes on with more steps than it was laid out for stays at the last rate: a cosine
    would rise again.

    Raises:
        ConfigError: transformers knows no such schedule, or it needs what we do not have.
    """
    from transformers import get_scheduler

    lr = optimizer.param_groups[0]["lr"]
    options: dict[str, Any] = {}
    if config.name in ("cosine_with_min_lr", "cosine_warmup_with_min_lr"):
        options = {"min_lr": lr * config.min_lr_ratio}
    elif config.name == "polynomial":
        options = {"lr_end": lr * config.min_lr_ratio}
    elif config.name == "warmup_stable_decay":
        warmup = warmup_steps(config)
        options = {
            "num_decay_steps": max(1, (config.total_steps - warmup) // 5),
            "min_lr_ratio": config.min_lr_ratio,
        }
    try:
        schedule: Any = get_scheduler(
            config.name,
            optimizer,
            num_warmup_steps=warmup_steps(config),
            num_training_steps=config.total_steps,
            scheduler_specific_kwargs=options,
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"the schedule cannot be built: {error}",
            field="schedule.name",
            value=config.name,
            remedy="use for example cosine_with_min_lr, linear or constant_with_warmup",
        ) from error
    if config.name.startswith("cosine"):
        # The one with min_lr and a warm-up of its own is a step ahead.
        last = config.total_steps - (config.name == "cosine_warmup_with_min_lr")
        schedule.lr_lambdas = [
            lambda step, rate=rate: rate(min(step, last)) for rate in schedule.lr_lambdas
        ]
    return schedule


def warmup_steps(config: ScheduleConfig) -> int:
    """Optimizer steps over which the rate rises from 0."""
    return math.ceil(config.warmup_ratio * config.total_steps)


def effective_zero_stage(settings: LearnerSettings) -> int:
    """The stage that DeepSpeed is given.

    With 16-bit weights stage 0 is run as stage 1: DeepSpeed's stage 0 takes an optimizer step
    with empty gradients at start, which spoils Adam's bias correction. Offloading needs a stage
    that has an optimizer of its own, too, and so does tensor parallelism: stage 0 leaves the norm
    of a gradient to us, who do not know which ranks have which part of it.
    """
    cut = settings.tensor_parallel_size > 1
    if settings.param_dtype != "float32" or offloads(settings) or cut:
        # Stage 1 that adds bf16 gradients up in fp32 is another engine, without stage 1's states.
        other_engine = settings.param_dtype == "bfloat16" and accumulated_in(settings) == "fp32"
        return max(settings.zero_stage, 2 if other_engine else 1)
    return settings.zero_stage


def accumulated_in(settings: LearnerSettings) -> str | None:
    """DeepSpeed's name of the type that micro-batches' gradients add up in.

    Beside bf16 weights it would add up in bf16, and lose the small ones of a step of many
    micro-batches.
    """
    if settings.grad_accum_dtype is None and settings.param_dtype == "bfloat16":
        return "fp32"
    return settings.grad_accum_dtype


def deepspeed_config(settings: LearnerSettings, spec: RunSpec) -> dict[str, Any]:
    """DeepSpeed's configuration. The learner itself accumulates, so it sees batches of one."""
    stage = effective_zero_stage(settings)
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": settings.overlap_comm,
        "contiguous_gradients": True,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    if offloads(settings):
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if stage == 3 and settings.zpg > 1:
        zero["zero_hpz_partition_size"] = settings.zpg
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": spec.max_norm,
        "steps_per_print": 10**12,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
    }
    if settings.param_dtype == "bfloat16":
        config["bf16"] = {"enabled": True, "check_grad_overflow": True}
    elif settings.param_dtype == "float16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 16}
    if accumulated_in(settings) is not None:
        config["data_types"] = {"grad_accum_dtype": accumulated_in(settings)}
    return config


def remove_stale_build_locks() -> None:
    """Delete the locks that a killed build of a DeepSpeed operator leaves behind.

    torch waits for them for ever and says nothing. A build takes a few minutes, so a lock that is
    older than STALE_LOCK_SECONDS belongs to nobody.
    """
    from torch.utils.cpp_extension import get_default_build_root

    for lock in Path(get_default_build_root()).glob("*/*/lock"):
        if lock.is_file() and time.time() - lock.stat().st_mtime > STALE_LOCK_SECONDS:
            log.warning("removing the stale build lock %s", lock)
            lock.unlink(missing_ok=True)

"""Optimizers and schedules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quartet.config.ds import TrainingFields
from quartet.config.optim import OptimizerFields
from quartet.config.tree import wrong
from quartet.errors import ConfigError

SCHEDULES = (
    "constant",
    "constant_with_warmup",
    "cosine",
    "cosine_with_min_lr",
    "cosine_with_restarts",
    "cosine_warmup_with_min_lr",
    "inverse_sqrt",
    "linear",
    "polynomial",
    "warmup_stable_decay",
)
"""Schedules of transformers that follow from warm-up, total steps and the lowest rate."""


def check_optimizers(config: Any) -> Iterator[ConfigError]:
    """Every optimizer of a training configuration."""
    ds: TrainingFields = config.ds
    if isinstance(config, OptimizerFields):
        yield from _check(config, ds, "")
        return
    yield from _check(config.actor, ds, "actor.")
    yield from _check(config.critic, ds, "critic.")


def _check(section: OptimizerFields, ds: TrainingFields, prefix: str) -> Iterator[ConfigError]:
    if section.lr_scheduler not in SCHEDULES:
        yield wrong(
            f"{prefix}lr_scheduler",
            section.lr_scheduler,
            "is no known schedule",
            f"take one of {', '.join(SCHEDULES)}",
        )
    if section.optim != "muon":
        return
    cut = ds.zero_stage != 0 or ds.tensor_parallel_size > 1
    if cut or ds.param_dtype != "fp32" or ds.adam_offload:
        yield wrong(
            f"{prefix}optim",
            section.optim,
            "needs whole matrices in fp32, which ZeRO and tensor groups cut into parts",
            "use --ds.zero_stage 0 --ds.param_dtype fp32, without --ds.adam_offload or "
            "--ds.tensor_parallel_size",
        )
    if section.max_norm > 0:
        yield wrong(
            f"{prefix}max_norm",
            section.max_norm,
            "Muon's updates are normalised already, and clipping them undoes that",
            f"add --{prefix}max_norm 0",
        )

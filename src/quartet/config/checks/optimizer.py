"""Optimizers and schedules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
    if isinstance(config, OptimizerFields):
        yield from _check(config, "")
        return
    yield from _check(config.actor, "actor.")
    yield from _check(config.critic, "critic.")


def _check(section: OptimizerFields, prefix: str) -> Iterator[ConfigError]:
    if section.lr_scheduler not in SCHEDULES:
        yield wrong(
            f"{prefix}lr_scheduler",
            section.lr_scheduler,
            "is no known schedule",
            f"take one of {', '.join(SCHEDULES)}",
        )
    if section.muon.ns_steps != 5:
        yield wrong(
            f"{prefix}muon.ns_steps",
            section.muon.ns_steps,
            "DeepSpeed's Muon always iterates 5 times",
            "leave the flag away",
        )
    if not section.muon.nesterov:
        yield wrong(
            f"{prefix}muon.no_nesterov",
            None,
            "DeepSpeed's Muon always uses Nesterov momentum",
            "leave the flag away",
        )
    if section.optim == "muon" and section.max_norm > 0:
        yield wrong(
            f"{prefix}max_norm",
            section.max_norm,
            "Muon's updates are normalised already, and clipping them undoes that",
            f"add --{prefix}max_norm 0",
        )

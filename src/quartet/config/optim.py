"""Optimizer and schedule flags: `adam.*`, `muon.*`, `optim`, `lr_scheduler` and their neighbours.

PPO has them twice (`actor.`, `critic.`); the other methods have them at the top level. Both inherit
`OptimizerFields`, so there is one place to add one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamConfig:
    """AdamW, or the Adam part of Muon (embeddings, heads, vectors)."""

    lr: float = 1e-6
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the first and the second moment."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 0.0
    """Decoupled decay. Biases and norm weights are exempt under AdamW."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MuonConfig:
    """Muon, for matrices that are neither embeddings nor heads."""

    lr: float = 0.02
    """Peak learning rate of the matrices."""
    momentum: float = 0.95
    """Momentum."""
    ns_steps: int = 5
    """Newton-Schulz iterations."""
    nesterov: bool = True
    """Nesterov momentum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerFields:
    """What one optimizer and its schedule need."""

    optim: Literal["adam", "muon"] = "adam"
    """Optimizer. muon needs `ds.zero_stage` 0, `ds.param_dtype` fp32 and `max_norm` 0."""
    adam: AdamConfig = field(default_factory=AdamConfig)
    """AdamW."""
    muon: MuonConfig = field(default_factory=MuonConfig)
    """Muon; has effect with `optim muon`."""
    lr_scheduler: str = "cosine_with_min_lr"
    """Name of a transformers schedule: cosine_with_min_lr, linear, constant_with_warmup, ..."""
    lr_warmup_ratio: float = 0.03
    """Share of the steps that warm up: ceil(ratio * total steps)."""
    min_lr_ratio: float = 0.1
    """Floor of the learning rate as a share of its peak; for the `*_with_min_lr` schedules."""
    max_norm: float = 1.0
    """Gradient norm to clip at; 0 does not clip. The norm before clipping is logged."""

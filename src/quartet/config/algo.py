"""Section `algo`: advantages, KL control and filtering of groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Estimator = Literal[
    "gae",
    "reinforce",
    "rloo",
    "reinforce_baseline",
    "group_norm",
    "dr_grpo",
    "flash_reinforce",
]

GROUP_ESTIMATORS: frozenset[str] = frozenset(
    {"rloo", "reinforce_baseline", "group_norm", "dr_grpo"}
)
"""Estimators whose baseline is the rest of the group: they need two samples of a prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageConfig:
    """From rewards to advantages, and the correction for samples of another policy."""

    estimator: Estimator = "gae"
    """How advantages are computed. gae needs a critic, no other does. Also spelled
    `--algo.advantage_estimator`."""
    lambd: float = 1.0
    """Lambda of GAE, in [0, 1]."""
    gamma: float = 1.0
    """Discount per token, in [0, 1]. Only gae and reinforce use one below 1."""
    no_std_norm: bool = False
    """Whiten advantages by the mean only."""
    std_eps: float = 1e-6
    """Added to a group's standard deviation before group_norm divides by it."""
    observation_spans: Literal["carry", "decay"] = "carry"
    """Tokens between two actions that the policy did not choose. carry: they take no time. decay:
    each is a step of value 0 that costs gamma * lambda, as in OpenRLHF."""
    is_correction_level: Literal["off", "token", "seq"] = "off"
    """Correct for the difference between the rollout engine's log-probabilities and the
    learner's: never, for each token, or for each sequence."""
    is_correction_mode: Literal["mask", "clip"] = "mask"
    """mask: outside the band the weight is 0. clip: the weight is kept inside the band."""
    is_correction_gating: Literal["ratio", "binary_kl", "tv"] = "ratio"
    """What is compared with the band."""
    is_correction_threshold: tuple[float, ...] = (0.5, 5.0)
    """The band, LOW HIGH; one number is HIGH, with LOW 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KlConfig:
    """The pull towards the reference model."""

    init_coef: float = 0.01
    """Weight of the KL term; 0 means that there is no reference model."""
    target: float | None = None
    """KL to steer for by changing the weight (adaptive control); None keeps the weight."""
    horizon: int = 10000
    """Samples over which the adaptive control reacts."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL divergence per token."""
    use_loss: bool = False
    """Add KL to the loss, instead of taking it from the reward."""
    unbiased_gradient: bool = False
    """With `use_loss`: the importance-weighted gradient of the reverse KL."""
    bound_all: bool = False
    """Keep a token's k1 and k2 within 10 too, without gradient beyond, as OpenRLHF does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgoConfig:
    """The algorithm."""

    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    """Advantages."""
    kl: KlConfig = field(default_factory=KlConfig)
    """KL control."""
    dynamic_filtering_enable: bool = False
    """Drop groups whose mean score lies outside the range or whose scores are all equal, and draw
    the next prompts in their place."""
    dynamic_filtering_range: tuple[float, float] = (0.0, 1.0)
    """The open interval LOW HIGH in which a group's mean score must lie."""
    dynamic_filtering_mean_only: bool = False
    """Keep groups of equal scores whose mean lies inside the range: OpenRLHF's rule."""

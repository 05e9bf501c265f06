"""Sections `learner` and `launch`: how the trainer finds or starts its services."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

HeadName = Literal["lm", "value", "reward"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerConfig:
    """The learner service of the model that is trained (PPO: of the policy)."""

    address: str | None = None
    """Learner to use, host:port. None: the trainer starts one."""
    num_ranks: int | None = None
    """Processes of each learner that the trainer starts. None: 1 on a machine without a GPU; else
    one for each GPU that it is given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerModelConfig:
    """The model of `quartet serve learner`."""

    model_name_or_path: str | None = None
    """The model to train: a folder, or a name on the Hugging Face hub."""
    head: HeadName = "lm"
    """lm: next token. value: a number for each token (critic). reward: one for each sequence."""
    new_head: bool = False
    """Give the model a new scalar head, even if it comes with one."""
    num_ranks: int | None = None
    """Processes. None: 1 on a machine without a GPU, else one for each visible GPU."""
    gradient_checkpointing_enable: bool = False
    """Recompute activations in the backward pass."""
    gradient_checkpointing_reentrant: bool = False
    """Use torch's reentrant form of it."""
    normalize_enable: bool = False
    """Head value: put out (x - mean) / std, with `mean` and `std` of the model's config.json."""
    freeze_visual_encoder: bool = False
    """Keep the vision part of a vision-language model as it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RefModelConfig:
    """The model of `quartet serve ref`."""

    model_name_or_path: str | None = None
    """The frozen model: a folder, or a name on the Hugging Face hub."""
    offload: bool = False
    """Keep its weights in main memory and bring them to the GPU when needed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DialConfig:
    """How the trainer calls services at given addresses."""

    insecure: bool = False
    """Call other machines in plain text; without it only this machine's services are called."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """Patience with services."""

    start_timeout: float = 600.0
    """Seconds that a service started by the trainer may take to load."""
    connect_timeout: float = 60.0
    """Seconds to wait for a service at a given address."""
    max_restarts: int = 3
    """Times that a rollout, reward or ref service started by the trainer is started again."""

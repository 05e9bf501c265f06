"""What the trainer starts: the serve configuration of each role, from a training configuration."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypeVar

from quartet.config.data import TokenizerFields
from quartet.config.derive import critic_model, split_list, trained_model
from quartet.config.ds import HeadLoadConfig, LoadConfig, PpoDsConfig, TrainingFields
from quartet.config.launch import HeadName, LearnerModelConfig, RefModelConfig
from quartet.config.methods import DpoConfig, PpoConfig, RmConfig, TrainerConfig
from quartet.config.models import RewardSourceFields
from quartet.config.sampling import RolloutEngineConfig, VllmEngineFields
from quartet.config.serve import (
    LearnerServeConfig,
    RefServeConfig,
    RewardServeConfig,
    RolloutServeConfig,
    ServeConfig,
)
from quartet.config.train import DeterminismFields

Role = Literal["learner", "critic", "ref", "reward", "rollout"]

S = TypeVar("S")
L = TypeVar("L", bound=LoadConfig)


def serve_config_for(role: Role, config: TrainerConfig, index: int = 0) -> ServeConfig:
    """The configuration of a service that the trainer starts.

    Ports, ready file and the bond to the parent are the launcher's, and given as flags.

    Args:
        role: which service; `critic` is a second learner.
        config: the training configuration.
        index: which of the role's replicas.

    Raises:
        ValueError: the method has no such service.
    """
    common: dict[str, Any] = {
        "data": narrowed(TokenizerFields, config.data),
        "use_ms": config.use_ms,
        # Several services cannot share the trainer's port.
        "metrics": dataclasses.replace(
            config.metrics, port=None if config.metrics.port is None else 0
        ),
    }
    if role == "learner":
        return _learner(config, common)
    if isinstance(config, PpoConfig):
        match role:
            case "critic":
                return _critic(config, common)
            case "ref":
                return _ref(config, config.actor.model_name_or_path, config.ref.offload, common)
            case "reward":
                return _reward(config, common)
            case "rollout":
                return _rollout(config, index, common)
    if isinstance(config, DpoConfig) and role == "ref":
        model = config.ref.model_name_or_path or config.model.model_name_or_path
        return _ref(config, model, config.ref.offload, common)
    raise ValueError(f"{type(config).__name__} has no {role} service")


def narrowed(cls: type[S], section: Any) -> S:
    """A smaller section with the values that a larger one has under the same names."""
    shared = {field.name for field in dataclasses.fields(section)}
    names = (field.name for field in dataclasses.fields(cls) if field.name in shared)  # pyright: ignore[reportArgumentType]
    return cls(**{name: getattr(section, name) for name in names})


def _unquantised(cls: type[L], section: TrainingFields) -> L:
    """How services that train nothing load: a push brings them whole weights."""
    return dataclasses.replace(narrowed(cls, section), load_in_4bit=False)


def _learner(config: TrainerConfig, common: dict[str, Any]) -> LearnerServeConfig:
    section = config.actor if isinstance(config, PpoConfig) else config.model
    head: HeadName = "reward" if isinstance(config, RmConfig) else "lm"
    return LearnerServeConfig(
        learner=LearnerModelConfig(
            model_name_or_path=trained_model(config),
            head=head,
            num_ranks=config.learner.num_ranks,
            gradient_checkpointing_enable=section.gradient_checkpointing_enable,
            gradient_checkpointing_reentrant=section.gradient_checkpointing_reentrant,
            freeze_visual_encoder=isinstance(config, PpoConfig)
            and config.actor.freeze_visual_encoder,
        ),
        ds=narrowed(PpoDsConfig, config.ds),
        train=narrowed(DeterminismFields, config.train),
        **common,
    )


def _critic(config: PpoConfig, common: dict[str, Any]) -> LearnerServeConfig:
    model = critic_model(config)
    return LearnerServeConfig(
        learner=LearnerModelConfig(
            model_name_or_path=model,
            head="value",
            # A policy's folder has no scalar head worth keeping; a reward model's is the start.
            new_head=model == config.actor.model_name_or_path,
            num_ranks=config.learner.num_ranks,
            gradient_checkpointing_enable=config.actor.gradient_checkpointing_enable,
            gradient_checkpointing_reentrant=config.actor.gradient_checkpointing_reentrant,
            normalize_enable=config.reward.normalize_enable,
        ),
        ds=config.ds,
        train=narrowed(DeterminismFields, config.train),
        **common,
    )


def _ref(
    config: PpoConfig | DpoConfig, model: str | None, offload: bool, common: dict[str, Any]
) -> RefServeConfig:
    return RefServeConfig(
        ref=RefModelConfig(model_name_or_path=model, offload=offload),
        ds=_unquantised(LoadConfig, config.ds),
        train=narrowed(DeterminismFields, config.train),
        **common,
    )


def _reward(config: PpoConfig, common: dict[str, Any]) -> RewardServeConfig:
    return RewardServeConfig(
        reward=narrowed(RewardSourceFields, config.reward),
        ds=_unquantised(HeadLoadConfig, config.ds),
        batch_size=config.rollout.micro_batch_size,
        **common,
    )


def _rollout(config: PpoConfig, index: int, common: dict[str, Any]) -> RolloutServeConfig:
    servers = split_list(config.rollout.server_url)
    return RolloutServeConfig(
        rollout=dataclasses.replace(
            narrowed(RolloutEngineConfig, config.rollout),
            model_name_or_path=config.actor.model_name_or_path,
            # Each engine has a server of its own.
            server_url=servers[index] if servers else None,
        ),
        vllm=narrowed(VllmEngineFields, config.vllm),
        ds=_unquantised(LoadConfig, config.ds),
        train=narrowed(DeterminismFields, config.train),
        **common,
    )

"""Services on their own."""

from __future__ import annotations

from collections.abc import Iterator

from quartet.config.checks.adapters import check_adapter_settings
from quartet.config.checks.ppo import check_reward_source
from quartet.config.checks.server import check_server
from quartet.config.rewardparts import targets_of
from quartet.config.serve import (
    LearnerServeConfig,
    RefServeConfig,
    RewardServeConfig,
    RolloutServeConfig,
    ServeConfig,
)
from quartet.config.tree import wrong
from quartet.errors import ConfigError


def check_service(config: ServeConfig) -> Iterator[ConfigError]:
    """What a service cannot start without."""
    match config:
        case RolloutServeConfig():
            yield from _check_model("rollout", config.rollout.model_name_or_path)
            yield from check_server(config.rollout, config.rollout.engine, count=1)
        case RefServeConfig():
            yield from _check_model("ref", config.ref.model_name_or_path)
        case LearnerServeConfig():
            yield from _check_model("learner", config.learner.model_name_or_path)
            yield from _check_head(config)
            yield from check_adapter_settings(config.ds)
        case RewardServeConfig():
            source = config.reward
            yield from check_reward_source(
                source.model_name_or_path,
                source.remote_url,
                parts=source.parts,
                address=None,
            )
            has_model = source.model_name_or_path or targets_of(source.parts, "model")
            if source.normalize_enable and not has_model:
                yield wrong(
                    "reward.normalize_enable",
                    None,
                    "mean and standard deviation come from a reward model, and there is none",
                    "leave the flag away, or give --reward.model_name_or_path",
                )
    try:
        config.rpc.check()
        if isinstance(config, RewardServeConfig):
            config.http.check(insecure=config.rpc.insecure)
    except ConfigError as error:
        yield error


def _check_model(section: str, model: str | None) -> Iterator[ConfigError]:
    if not model:
        yield wrong(
            f"{section}.model_name_or_path",
            None,
            "there is no model to serve",
            f"give --{section}.model_name_or_path a folder or a name on the hub",
        )


def _check_head(config: LearnerServeConfig) -> Iterator[ConfigError]:
    if config.learner.head == "lm" and config.learner.new_head:
        yield wrong(
            "learner.new_head",
            None,
            "a language model keeps its head",
            "leave the flag away, or give --learner.head value or reward",
        )
    if config.learner.head != "value" and config.learner.normalize_enable:
        yield wrong(
            "learner.normalize_enable",
            None,
            "only a critic puts out normalised values",
            "leave the flag away, or give --learner.head value",
        )

"""Are the values consistent? Asked before anything starts, and on any machine with the same answer.

Whether this build and this machine can run them is another question: `quartet.config.runnable`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quartet.config.checks.adapters import check_adapters
from quartet.config.checks.agents import check_agent
from quartet.config.checks.data import (
    check_datasets,
    check_dpo,
    check_model,
    check_rm,
    check_sft,
)
from quartet.config.checks.kernels import check_kernels
from quartet.config.checks.optimizer import check_optimizers
from quartet.config.checks.output import check_addresses, check_checkpoints, check_run_name
from quartet.config.checks.placement import check_parallelism, check_placement
from quartet.config.checks.ppo import (
    check_advantages,
    check_batches,
    check_correction,
    check_evaluation,
    check_kl,
    check_modes,
    check_rewards,
    check_sampling,
)
from quartet.config.checks.serve import check_service
from quartet.config.limits import check_limits
from quartet.config.methods import DpoConfig, PpoConfig, RmConfig, SftConfig
from quartet.config.serve import LearnerServeConfig, ServeConfig
from quartet.errors import ConfigError

_PPO_CHECKS = (
    check_advantages,
    check_correction,
    check_kl,
    check_agent,
    check_rewards,
    check_sampling,
    check_batches,
    check_evaluation,
    check_modes,
    check_placement,
)


def problems(config: Any) -> Iterator[ConfigError]:
    """All that is wrong with a configuration, the most basic first."""
    yield from check_limits(config)
    if isinstance(config, ServeConfig):
        yield from check_service(config)
        if isinstance(config, LearnerServeConfig):
            yield from check_kernels(config.ds)
        return
    yield from check_model(config)
    yield from check_datasets(config)
    yield from check_optimizers(config)
    yield from check_adapters(config)
    match config:
        case PpoConfig():
            for check in _PPO_CHECKS:
                yield from check(config)
        case SftConfig():
            yield from check_sft(config)
        case RmConfig():
            yield from check_rm(config)
        case DpoConfig():
            yield from check_dpo(config)
    yield from check_parallelism(config)
    yield from check_kernels(config.ds)
    yield from check_checkpoints(config)
    yield from check_run_name(config)
    yield from check_addresses(config)


def validate(config: Any) -> None:
    """Raise the first of `problems`.

    Raises:
        ConfigError: names field, value and remedy.
    """
    for problem in problems(config):
        raise problem

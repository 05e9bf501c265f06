"""An agent makes the samples and judges them: nobody else may be asked to."""

from __future__ import annotations

from collections.abc import Iterator

from quartet.config.derive import uses_agent
from quartet.config.methods import PpoConfig
from quartet.config.tree import wrong
from quartet.errors import ConfigError


def check_agent(config: PpoConfig) -> Iterator[ConfigError]:
    """The agent's file, and what does not go with one."""
    path = config.train.agent_func_path
    if not uses_agent(config) or path is None:
        return
    if not path.endswith(".py"):
        yield wrong(
            "train.agent_func_path", path, "is no Python file", "give a path that ends in .py"
        )
    reward = config.reward
    for name, value in (
        ("reward.remote_url", reward.remote_url),
        ("reward.address", reward.address),
        ("reward.model_name_or_path", reward.model_name_or_path),
        ("reward.normalize_enable", reward.normalize_enable or None),
    ):
        if value is not None:
            yield wrong(
                name,
                None if value is True else str(value),
                "the agent of --train.agent_func_path gives the rewards itself",
                "leave the flag away",
            )

"""The registry of engines. An engine's module is imported when it is asked for, never before."""

from __future__ import annotations

import importlib
import importlib.util
from typing import cast

from quartet.config.derive import rollout_engine
from quartet.config.machine import this_machine
from quartet.config.sampling import EngineName
from quartet.errors import ConfigError
from quartet_rollout.engine import OpenEngine

ENGINES: dict[EngineName, str] = {
    "transformers": "quartet_rollout.engines.transformers",
    "vllm": "quartet_rollout.engines.vllm",
    "openai": "quartet_rollout.engines.openai",
}
"""Engine name -> module with `open_engine`."""

PACKAGES: dict[EngineName, tuple[str, str]] = {
    "vllm": (
        "vllm",
        "`make setup-vllm` makes an environment with it for CPUs; or use rollout.engine "
        "transformers",
    ),
    "openai": ("aiohttp", "install it; or use rollout.engine transformers"),
}
"""Engine name -> package that it needs and that a rollout service may lack, and what to do then."""


def find_engine(name: EngineName) -> OpenEngine:
    """The way to open an engine; `auto` takes the best that this build and this machine have.

    Raises:
        ConfigError: There is no such engine in this build, or its package is not installed.
    """
    module = ENGINES.get(name)
    if name == "auto":
        module = ENGINES.get(rollout_engine(name, this_machine()), ENGINES["transformers"])
    if module is None:
        raise ConfigError(
            f"rollout.engine {name} is not in this build",
            field="rollout.engine",
            value=name,
            remedy=f"use auto or {', '.join(ENGINES)}",
        )
    package, remedy = PACKAGES.get(name, ("", ""))
    if package and importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"rollout.engine {name}: the package {package} is not installed",
            field="rollout.engine",
            value=name,
            remedy=remedy,
        )
    return cast("OpenEngine", importlib.import_module(module).open_engine)

"""The registry of engines. An engine's module is imported when it is asked for, never before."""

from __future__ import annotations

import importlib
from typing import cast

from quartet.config.derive import rollout_engine
from quartet.config.machine import this_machine
from quartet.config.sampling import EngineName
from quartet.errors import ConfigError
from quartet_rollout.engine import OpenEngine

ENGINES: dict[EngineName, str] = {
    "transformers": "quartet_rollout.engines.transformers",
}
"""Engine name -> module with `open_engine`."""


def find_engine(name: EngineName) -> OpenEngine:
    """The way to open an engine; `auto` takes the best that this build and this machine have.

    Raises:
        ConfigError: There is no such engine in this build.
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
    return cast("OpenEngine", importlib.import_module(module).open_engine)

"""`openrlhf.utils.agent` for files that were written for OpenRLHF: they import it, and run."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from quartet.agents import executors

NAMES = (
    "AgentExecutorBase",
    "AgentInstanceBase",
    "MultiTurnAgentExecutor",
    "SingleTurnAgentExecutor",
)


def install() -> None:
    """Have this process import the classes of `quartet.agents` by OpenRLHF's module name.

    Where OpenRLHF is installed, its other modules stay what they are: only this one is ours, since
    its own would look for Ray and vLLM.
    """
    if importlib.util.find_spec("openrlhf") is None:
        for name in ("openrlhf", "openrlhf.utils"):
            package = ModuleType(name, "Stands in for OpenRLHF, which is not installed.")
            package.__path__ = []
            sys.modules[name] = package
        sys.modules["openrlhf"].__dict__["utils"] = sys.modules["openrlhf.utils"]
    module = ModuleType("openrlhf.utils.agent", "Quartet's classes by OpenRLHF's name.")
    module.__dict__.update({name: getattr(executors, name) for name in NAMES})
    sys.modules["openrlhf.utils.agent"] = module

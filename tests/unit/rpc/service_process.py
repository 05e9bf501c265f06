"""A service in a process of its own, for test_run.py: MODE and the settings as JSON."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from quartet.config.rpc import MetricsConfig, RpcConfig
from quartet.errors import ConfigError, FatalError
from quartet.rpc import server
from quartet.testing.fakes import FakeReward


class Slow(FakeReward):
    """Does at start and stop what `mode` says."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        if mode == "hold":
            self.script.hold("Score")

    async def start(self) -> None:
        print("starting", flush=True)
        match self.mode:
            case "refuse":
                raise FatalError("no model here", remedy="give one")
            case "misconfigured":
                raise ConfigError("flag x is wrong", field="x")
            case "bug":
                raise KeyError("k")
            case "loading":
                await asyncio.Event().wait()
            case "thread":
                await asyncio.to_thread(time.sleep, 100)

    async def stop(self) -> None:
        print("stopping", flush=True)


class Dying(Slow):
    """Finds that it cannot go on."""

    async def failed(self) -> FatalError:
        return FatalError("the engine is gone")


def main() -> int:
    mode, settings = sys.argv[1], json.loads(sys.argv[2])
    if mode == "parent":
        # Starts the real one as its child, tells its pid, and waits to be killed.
        child = subprocess.Popen([sys.executable, __file__, "serve", sys.argv[2]])
        print(child.pid, flush=True)
        return child.wait()
    metrics: dict[str, Any] = settings.pop("metrics", {})
    assert Path(__file__).exists()
    service = Dying(mode) if mode == "dying" else Slow(mode)
    return server.run(service, RpcConfig(**settings), MetricsConfig(**metrics))


if __name__ == "__main__":
    sys.exit(main())

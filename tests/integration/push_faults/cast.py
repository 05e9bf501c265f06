"""The processes of the fault tests, as the tests see them."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from quartet.clients import LearnerClient, RolloutClient
from quartet.types import OptimizerConfig, RunSpec, ScheduleConfig

SCRIPT = Path(__file__).parent / "service.py"
SPEC = RunSpec(
    run_id="faults",
    optimizer=OptimizerConfig(lr=1e-3),
    schedule=ScheduleConfig(name="constant", total_steps=10),
)


class Nursery:
    """Forks services that have their imports behind them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "nursery.log"
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        self._born = 0
        self.alive: list[Process] = []
        self._answer()

    def process(self, argv: list[str]) -> Process:
        """Start `quartet <argv>`."""
        self._born += 1
        folder = self.folder / str(self._born)
        folder.mkdir()
        argv = [*argv, "--rpc.ready_file", str(folder / "ready.json")]
        order = {"argv": argv, "folder": str(folder), "log": str(folder / "log")}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        made = Process(self._answer()["pid"], folder)
        self.alive.append(made)
        return made

    def end(self) -> None:
        """End it and all services."""
        self._process.stdin.close()
        self._process.wait(60)
        for process in self.alive:
            process.wait_dead(30)
            os.close(process.handle)

    def stacks(self) -> str:
        """What every thread of every process is doing now."""
        waits = [p for p in self.alive if not p.is_dead]
        for process in waits:
            process.signal(signal.SIGCONT)
            process.signal(signal.SIGUSR2)
        time.sleep(2)
        return "\n\n".join(f"{p.folder}:\n{(p.folder / 'log').read_text()[-6000:]}" for p in waits)

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        assert line, self.log.read_text()
        return json.loads(line)


class Process:
    """One service."""

    def __init__(self, pid: int, folder: Path) -> None:
        self.pid = pid
        self.folder = folder
        self.address = ""
        self.handle = os.pidfd_open(pid)
        self.is_killed = False
        """It was sent SIGKILL; its sockets close a moment before it has ended."""

    async def listening(self) -> None:
        """Wait for its address."""
        while not (self.folder / "ready.json").exists():
            assert not self.is_dead, (self.folder / "log").read_text()
            await asyncio.sleep(0.02)
        self.address = json.loads((self.folder / "ready.json").read_text())["address"]

    @property
    def is_dead(self) -> bool:
        """True once the process has ended."""
        return bool(select.select([self.handle], [], [], 0)[0])

    def wait_dead(self, timeout: float) -> None:
        """Wait until it has ended."""
        assert select.select([self.handle], [], [], timeout)[0], f"{self.pid} does not end"

    def signal(self, number: int) -> None:
        """Send a signal, if there is anybody."""
        self.is_killed = self.is_killed or number == signal.SIGKILL
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, number)

    def arm(self, at: str, index: int, do: str) -> None:
        """Have a fault happen to it; see hooks.py."""
        for name in ("fired.json", "go"):
            (self.folder / name).unlink(missing_ok=True)
        aside = self.folder / ".fault.json"
        aside.write_text(json.dumps({"at": at, "index": index, "do": do}))
        aside.rename(self.folder / "fault.json")

    async def fired(self) -> float:
        """Wait for the fault; when it came, by time.monotonic()."""
        path = self.folder / "fired.json"
        while not path.exists():  # noqa: ASYNC110 - the event is in another process
            await asyncio.sleep(0.005)
        return json.loads(path.read_text())["when"]

    def go(self) -> None:
        """End a hold."""
        (self.folder / "go").touch()


async def start_rollout(nursery: Nursery, model: Path) -> Process:
    """`quartet serve rollout`, serving."""
    process = nursery.process(
        [
            *("serve", "rollout", "--rollout.engine", "transformers"),
            *("--rollout.model_name_or_path", str(model), "--ds.param_dtype", "fp32"),
            *("--rpc.port", "0", "--rpc.die_with_parent"),
        ]
    )
    await process.listening()
    async with RolloutClient(process.address) as client:
        await client.wait_ready(300)
    return process


async def start_learner(nursery: Nursery, model: Path) -> Process:
    """`quartet serve learner`, in a run."""
    process = nursery.process(
        [
            *("serve", "learner", "--learner.model_name_or_path", str(model)),
            *("--ds.param_dtype", "fp32", "--rpc.port", "0", "--rpc.die_with_parent"),
        ]
    )
    await process.listening()
    async with LearnerClient(process.address) as client:
        await client.wait_ready(300)
        await client.start_run(SPEC)
    return process


@asynccontextmanager
async def watchdog(nursery: Nursery, seconds: float):
    """Fail with the stacks of all processes instead of hanging."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        stacks = await asyncio.to_thread(nursery.stacks)
        raise AssertionError(f"still under way after {seconds:g} s:\n{stacks}") from None

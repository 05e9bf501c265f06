"""Starts the services that have no address, watches them, and stops them all.

Each service is a process of its own in a process group of its own, with its settings in
`<run>/services/<role>.yaml` and its output in `<run>/logs/<role>.log`. It binds a free port and
writes it into a ready file; then its health is asked until it serves. A service that ends early is
reported with its exit code and the last lines of its log.

Whatever happens to the trainer, nothing is left behind: `stop` ends the process groups, and the
kernel ends the services of a trainer that was killed (`--rpc.die_with_parent`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quartet.errors import ConfigError, FatalError
from quartet.obs.progress import Phase, Progress

LOG_LINES = 15
"""Lines of a service's log that are shown when it ends early."""

POLL_SECONDS = 0.05
"""How often a ready file is looked for: no event crosses the process boundary before it."""

STOP_GRACE_SECONDS = 5.0
"""What a service gets beside its own drain time before its process group is killed."""

DEATH_NOTICE_SECONDS = 1.0
"""After a lost call: how long it may take until the death of a local service is known."""

Probe = Callable[[str], Awaitable[bool]]
"""Says whether the service at an address serves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalService:
    """A service to start on this machine."""

    role: str
    """What it is to the run, for example "learner", "critic", "rollout-1"."""
    room: str
    """What it is: rollout, reward, ref or learner."""
    settings: str
    """Its configuration as YAML."""
    python: str = sys.executable
    """The Python that runs it."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables beside the trainer's own."""
    max_restarts: int = 0
    """How often it is started again when it dies in the middle of a run."""
    remedy: str = ""
    """What a user can do when it is gone for good."""
    drain_seconds: float = 20.0
    """How long it may take to finish its calls when it is stopped."""


@dataclass(slots=True)
class _Running:
    """A started service."""

    service: LocalService
    process: Process
    began: float
    address: str = ""
    restarts: int = 0
    is_lost: bool = False
    """It is not started again."""


class Launcher:
    """Starts, watches and stops local services. Use `start` once, and `stop` always."""

    def __init__(
        self,
        folder: Path,
        services: Sequence[LocalService],
        *,
        probe: Probe,
        progress: Progress,
        start_timeout: float = 600.0,
        command: Callable[[LocalService, Path, Path], list[str]] | None = None,
    ) -> None:
        """Prepare to start `services` with files below `folder`.

        Args:
            folder: The run's folder.
            services: What to start.
            probe: Says whether an address serves; asked again and again.
            progress: Where to say what is waited for.
            start_timeout: Seconds that a service may take until it serves.
            command: Command line of a service, given its YAML and ready file; a test's own.
        """
        self._folder = folder
        self._services = list(services)
        self._probe = probe
        self._progress = progress
        self._start_timeout = start_timeout
        self._command = command or serve_command
        self._restarting: set[str] = set()
        self._one_died = asyncio.Event()
        self._all_there = asyncio.Event()
        self._running: dict[str, _Running] = {}
        self._stopping = False

    @property
    def addresses(self) -> dict[str, str]:
        """Address of each started service by role."""
        return {role: running.address for role, running in self._running.items()}

    @property
    def pids(self) -> dict[str, int]:
        """Process id of each started service by role."""
        return {role: running.process.pid for role, running in self._running.items()}

    async def start(self) -> dict[str, str]:
        """Start all services and wait until they serve.

        Returns:
            The address of each by role.

        Raises:
            ConfigError: a service refused its settings (its exit code was 2).
            FatalError: a service ended, or did not serve in time. The others are still there:
                call `stop`.
        """
        if not self._services:
            return {}
        for name in ("services", "logs"):
            (self._folder / name).mkdir(parents=True, exist_ok=True)
        for service in self._services:
            self._running[service.role] = await self._spawn(service)
        total = len(self._services)
        with self._progress.phase("start services", total=total, unit="services") as phase:
            waiting = dict.fromkeys(self._running, "")
            async with asyncio.TaskGroup() as group:
                for running in self._running.values():
                    group.create_task(self._wait_ready(running, phase, waiting))
        return self.addresses

    async def watch(self) -> None:
        """Wait until a service dies for good.

        Raises:
            FatalError: naming the service, its exit code and its log.
        """
        async with asyncio.TaskGroup() as group:
            for running in self._running.values():
                group.create_task(self._watch_one(running))

    async def settle(self, *, notice: float = DEATH_NOTICE_SECONDS) -> bool:
        """After a lost call: wait until the services that died are back.

        Args:
            notice: seconds in which a death shows itself.

        Returns:
            Whether there was one to wait for.
        """
        try:
            await asyncio.wait_for(self._one_died.wait(), notice)
        except TimeoutError:
            return False
        await self._all_there.wait()
        return True

    async def stop(self) -> None:
        """End all services: SIGTERM, then SIGKILL to the process group. May be called twice."""
        self._stopping = True
        await asyncio.gather(*(self._stop_one(r) for r in self._running.values()))

    def kill(self) -> None:
        """End all process groups at once."""
        for running in self._running.values():
            _kill_group(running.process)

    async def _spawn(self, service: LocalService, port: int = 0) -> _Running:
        settings = self._folder / "services" / f"{service.role}.yaml"
        settings.write_text(service.settings, encoding="utf-8")
        ready = self._ready_file(service)
        ready.unlink(missing_ok=True)
        command = self._command(service, settings, ready)
        if port:
            command = [*command, "--rpc.port", str(port)]
        with self._log_file(service).open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
                env={**inherited_environment(), **service.env},
                # Ctrl-C in a terminal goes to the whole foreground group. The trainer alone
                # should get it, and stop its services in order.
                start_new_session=True,
            )
        return _Running(service=service, process=process, began=time.monotonic())

    async def _wait_ready(
        self, running: _Running, phase: Phase | None = None, waiting: dict[str, str] | None = None
    ) -> None:
        """Wait for the ready file, then for health."""
        role = running.service.role
        step = "starting"
        ended = asyncio.ensure_future(running.process.wait())
        try:
            while True:
                seconds = time.monotonic() - running.began
                if ended.done():
                    raise self._ended(running, "while it started")
                if seconds > self._start_timeout:
                    raise self._late(running, step)
                if not running.address:
                    running.address = _read_address(self._ready_file(running.service))
                if running.address:
                    step = "loading"
                    if await self._probe(running.address):
                        break
                if phase is not None and waiting is not None:
                    waiting[role] = (
                        f"{step}, {seconds:.0f} s of at most {self._start_timeout:.0f} s"
                    )
                    phase.waiting_for = "; ".join(f"{r}: {text}" for r, text in waiting.items())
                await asyncio.wait([ended], timeout=POLL_SECONDS)
        finally:
            ended.cancel()
        if phase is not None and waiting is not None:
            del waiting[role]
            phase.waiting_for = "; ".join(f"{r}: {text}" for r, text in waiting.items())
            phase.advance()

    async def _watch_one(self, running: _Running) -> None:
        """Restart a dead service as often as it may be.

        Raises:
            FatalError: it died once more, and no other can do its work.
        """
        service = running.service
        when = "in the middle of the run"
        while True:
            await running.process.wait()
            if self._stopping:
                return
            self._note(service.role, dead=True)
            if running.restarts >= service.max_restarts:
                running.is_lost = True
                error = self._ended(running, when, fatal=True)
                if not self._others(service):
                    raise error
                self._progress.say(f"going on without it: {error}")
                self._note(service.role, dead=False)
                return
            running.restarts += 1
            self._progress.say(
                f"{service.role} ended with {_exit(running.process)}; starting it again "
                f"({running.restarts} of at most {service.max_restarts}), "
                f"log {self._log_file(service)}"
            )
            _kill_group(running.process)
            # The same port, so that clients find it again at the address they have.
            again = await self._spawn(service, port=_port_of(running.address))
            running.process, running.began = again.process, again.began
            address, running.address = running.address, ""
            try:
                await self._wait_ready(running)
            except (FatalError, ConfigError):
                # It died again, or stands still: both count as a death.
                running.address = running.address or address
                _kill_group(running.process)
                when = "while it started again"
                continue
            when = "in the middle of the run"
            self._note(service.role, dead=False)

    def _others(self, service: LocalService) -> bool:
        """Whether another service that is not lost does the same work. A learner has no double."""
        same = [r for r in self._running.values() if r.service.room == service.room]
        return service.room != "learner" and not all(r.is_lost for r in same)

    def _note(self, role: str, *, dead: bool) -> None:
        """Keep track of who is being started again."""
        if dead:
            self._restarting.add(role)
            self._one_died.set()
            self._all_there.clear()
            return
        self._restarting.discard(role)
        if not self._restarting:
            self._one_died.clear()
            self._all_there.set()

    async def _stop_one(self, running: _Running) -> None:
        process = running.process
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            limit = running.service.drain_seconds + STOP_GRACE_SECONDS
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit):
                    await process.wait()
        # Also after a clean end: a learner's other ranks are in its group.
        _kill_group(process)
        await process.wait()

    def _ended(
        self, running: _Running, when: str, *, fatal: bool = False
    ) -> FatalError | ConfigError:
        """The error for a service that is gone, with the end of its log."""
        service, process = running.service, running.process
        log = self._log_file(service)
        lines = _last_lines(log)
        where = f" (it was at {running.address})" if running.address else ""
        ended = f"{service.role} ended with {_exit(process)} {when}{where}"
        message = f"{ended}; the end of {log}:\n{lines}"
        if process.returncode == ConfigError.exit_code and not fatal:
            return ConfigError(message, reason="SERVICE_REFUSED_SETTINGS", field=service.role)
        remedy = service.remedy if fatal else ""
        return FatalError(message, reason="SERVICE_ENDED", replica=service.role, remedy=remedy)

    def _late(self, running: _Running, step: str) -> FatalError:
        log = self._log_file(running.service)
        return FatalError(
            f"{running.service.role} did not serve within {self._start_timeout:.0f} s (it was "
            f"{step}); the end of {log}:\n{_last_lines(log)}",
            reason="SERVICE_LATE",
            remedy="raise launch.start_timeout if it only needs more time",
        )

    def _ready_file(self, service: LocalService) -> Path:
        return self._folder / "services" / f"{service.role}.ready"

    def _log_file(self, service: LocalService) -> Path:
        return self._folder / "logs" / f"{service.role}.log"


def serve_command(service: LocalService, settings: Path, ready: Path) -> list[str]:
    """Command line of `quartet serve` for a service."""
    return [
        *(service.python, "-m", "quartet", "serve", service.room),
        *("--config", str(settings)),
        *("--rpc.port", "0"),
        *("--rpc.ready_file", str(ready)),
        "--rpc.die_with_parent",
    ]


def inherited_environment() -> dict[str, str]:
    """The trainer's environment, without settings that were meant for the trainer.

    A service reads QUARTET_* too, and they would win over the settings written for it.
    """
    return {k: v for k, v in os.environ.items() if not k.startswith("QUARTET_")}


def _read_address(ready: Path) -> str:
    """The address in a ready file, or "" while there is none. It appears by rename, whole."""
    try:
        return str(json.loads(ready.read_text())["address"])
    except FileNotFoundError:
        return ""


def _last_lines(log: Path) -> str:
    """The end of a log, indented."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
    except FileNotFoundError:
        lines = []
    return "\n".join(f"    {line}" for line in lines[-LOG_LINES:]) or "    (it is empty)"


def _exit(process: Process) -> str:
    """How a process ended, in words."""
    code = process.returncode
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


def _port_of(address: str) -> int:
    """The TCP port of host:port; 0 for a unix socket, whose path is in its settings."""
    return 0 if address.startswith("unix:") else int(address.rsplit(":", 1)[1])


def _kill_group(process: Process) -> None:
    """SIGKILL whatever is left of a service's process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)

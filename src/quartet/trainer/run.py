"""The frame around a run: its folder, its signals, its last line and its exit code.

`conduct` is what every method's `main` is made of. Whatever ends a run (its end, an error, Ctrl-C,
SIGTERM, a service that dies), services are stopped, files are closed, and one line says what was.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from quartet.config import TrainerConfig
from quartet.config.derive import engine_python
from quartet.config.files import to_yaml
from quartet.config.machine import this_machine
from quartet.config.notes import notes
from quartet.config.tree import wrong
from quartet.errors import ConfigError, FatalError, InfraError, QuartetError, UnavailableError
from quartet.obs.progress import Progress
from quartet.trainer.launch import DEATH_NOTICE_SECONDS, Launcher, LocalService
from quartet.trainer.ledger import Ledger
from quartet.trainer.outages import way_on, what_is_left
from quartet.trainer.preflight import check_models, check_outputs
from quartet.trainer.sinks import Sinks, open_sinks

EXIT_OK, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130


@dataclass(kw_only=True, slots=True)
class Run:
    """What a run has at hand."""

    config: TrainerConfig
    folder: Path
    run_id: str
    """Unique to this process: a service that outlives a trainer knows the next one from it."""
    progress: Progress
    ledger: Ledger
    sinks: Sinks
    launcher: Launcher
    summary: dict[str, Any] = field(default_factory=dict)
    """What summary.json will hold."""


Body = Callable[[Run], Awaitable[None]]
"""The method itself: it finds its services at `run.launcher` and its flags at `run.config`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A run that is ready to begin."""

    services: list[LocalService]
    """What to start on this machine."""
    body: Body


def conduct(config: TrainerConfig, prepare: Callable[[Progress], Job]) -> int:
    """Prepare and do a run, and say how it ended.

    Args:
        config: all settings; `config.run.folder` is where the run is kept.
        prepare: reads data and checks everything that can be checked before anything starts.

    Returns:
        The exit code: 0 done, 1 failed, 2 wrong settings, 130 interrupted.
    """
    progress = Progress()
    folder = config.run.folder
    began = time.time()
    outcome: dict[str, Any] = {"status": "failed"}
    claimed = False
    try:
        with _sigterm_as_interrupt():
            for note in notes(config, this_machine(engine_python=engine_python(config))):
                progress.say(f"note: {note}")
            check_models(config)
            job = prepare(progress)
            check_outputs(config)
            _claim(folder, config)
            claimed = True
            asyncio.run(_perform(config, job, progress, outcome))
        outcome["status"] = "finished"
        last, code = f"finished: {folder}", EXIT_OK
    except KeyboardInterrupt:
        outcome["status"] = "interrupted"
        last, code = f"interrupted; {what_is_left(config)}", EXIT_INTERRUPTED
    except BaseException as error:
        cause = first_cause(error)
        code = ConfigError.exit_code if isinstance(cause, ConfigError) else EXIT_FAILED
        known = isinstance(cause, QuartetError)
        last = f"error: {cause}" if known else f"error: {type(cause).__name__}: {cause}"
        if isinstance(cause, UnavailableError) and not cause.info.remedy:
            # A learner holds the weights: nobody else can do its work, so it is not waited for.
            last += f" ({way_on(config)})"
        outcome["error"] = str(cause)
        if not known:
            traceback.print_exception(error)
    progress.close()
    if claimed:
        outcome["seconds"] = round(time.time() - began, 3)
        write_summary(folder, outcome)
    print(last, file=sys.stdout if code == EXIT_OK else sys.stderr, flush=True)
    return code


def absolute(folder: str) -> str:
    """The folder as a path that means the same to a process with another working folder."""
    return str(Path(folder).expanduser().absolute())


def first_cause(error: BaseException) -> BaseException:
    """The error to show: of a group of errors, the most telling one.

    When one task fails the others are cancelled, and calls to a dead service fail as well: so what
    the user can mend comes before what the machinery reports.
    """
    leaves = list(_leaves(error))
    for kind in (ConfigError, FatalError, QuartetError):
        for leaf in leaves:
            if isinstance(leaf, kind):
                return leaf
    return leaves[0]


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _claim(folder: Path, config: TrainerConfig) -> None:
    """Make the run's folder and save the settings, without secrets.

    Raises:
        ConfigError: the folder holds another run, or cannot be written.
    """
    try:
        taken = (folder / "ledger.sqlite").exists() and not config.ckpt.load_enable
        if not taken:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    except OSError as error:
        raise wrong(
            "run.dir",
            config.run.dir,
            f"the run's folder {folder} cannot be written ({error.strerror or error})",
            "give a folder where this user may write",
        ) from error
    if taken:
        raise ConfigError(
            f"{folder} already holds a run",
            reason="RUN_EXISTS",
            field="run.name",
            value=config.run.name,
            remedy="choose another --run.name, or remove the folder",
        )


async def _perform(
    config: TrainerConfig, job: Job, progress: Progress, outcome: dict[str, Any]
) -> None:
    """Do a prepared run with everything it needs open, and close all of it again."""
    from quartet.rpc.probe import probe

    async def serves(address: str) -> bool:
        return await probe(address) == "SERVING"

    folder = config.run.folder
    async with contextlib.AsyncExitStack() as stack:
        ledger = Ledger(folder / "ledger.sqlite")
        stack.push_async_callback(ledger.close)
        sinks = open_sinks(
            folder,
            logger=config.logger,
            metrics=config.metrics,
            say=progress.say,
            deterministic=config.train.full_determinism_enable,
            append=config.ckpt.load_enable,
            config=yaml.safe_load(to_yaml(config)),
        )
        stack.callback(sinks.close)
        launcher = Launcher(
            folder,
            job.services,
            probe=serves,
            progress=progress,
            start_timeout=config.launch.start_timeout,
        )
        stack.push_async_callback(_stop, launcher, progress)
        run = Run(
            config=config,
            folder=folder,
            run_id=f"{config.run.name}/{uuid.uuid4().hex[:8]}",
            progress=progress,
            ledger=ledger,
            sinks=sinks,
            launcher=launcher,
            summary=outcome,
        )
        await _until_signal(_guarded(run, job.body), launcher, progress)


async def _guarded(run: Run, body: Body) -> None:
    """Start the services, and do the body for as long as they live."""
    await run.launcher.start()
    work = asyncio.ensure_future(body(run))
    watch = asyncio.ensure_future(run.launcher.watch())
    try:
        await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        if work.done() and isinstance(work.exception(), InfraError):
            # A lost call may be all that is known yet of a service that has just died.
            await asyncio.wait({watch}, timeout=DEATH_NOTICE_SECONDS)
        if watch.done() and watch.exception() is not None:
            watch.result()
        await work
    finally:
        for task in (work, watch):
            task.cancel()
        await asyncio.gather(work, watch, return_exceptions=True)


async def _until_signal(work: Awaitable[None], launcher: Launcher, progress: Progress) -> None:
    """Await `work`; at SIGINT or SIGTERM give it up and raise KeyboardInterrupt.

    The second signal kills the services at once instead of letting them finish their calls.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    received: list[signal.Signals] = []

    def on_signal(number: signal.Signals) -> None:
        received.append(number)
        if len(received) == 1:
            own = "stopping the services started here (once more to kill them)"
            progress.say(f"{number.name}: {own if launcher.pids else 'ending the run'}")
            task.cancel()
        else:
            launcher.kill()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    try:
        await task
    except asyncio.CancelledError:
        if received:
            raise KeyboardInterrupt from None
        raise


async def _stop(launcher: Launcher, progress: Progress) -> None:
    if launcher.pids:
        with progress.phase("stop services", unit="services") as phase:
            phase.waiting_for = ", ".join(launcher.pids)
            await launcher.stop()
            phase.advance(len(launcher.pids))


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Outside the event loop, let SIGTERM do what Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def write_summary(folder: Path, outcome: Mapping[str, Any]) -> None:
    """Write what a run came to."""
    text = json.dumps(_finite(outcome), indent=2)
    (folder / "summary.json").write_text(text + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    """The same with null for NaN and infinity, which JSON does not have: a refused step's norm."""
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""The command line: `quartet train`, `serve`, `probe`, `tools`.

A command reads its configuration without importing torch, checks it, and only then imports what
does the work. Exit codes: 0 done, 1 failure, 2 wrong configuration, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import NoReturn

from quartet import __version__
from quartet.errors import ConfigError, QuartetError

EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130

USAGE = f"""\
quartet {__version__}: RLHF training as four gRPC services

  quartet train ppo|sft|rm|dpo [flags]               train; starts the services that have no address
  quartet serve rollout|reward|ref|learner [flags]   serve one of them
  quartet data preview ppo|sft|rm|dpo [flags]        show what of a data set would be trained
  quartet probe ADDRESS [SERVICE]                    ask a service whether it serves
  quartet conformance ROOM ADDRESS                   grade a server, whoever wrote it
  quartet tools NAME [arguments]                     helpers: see quartet tools --help
  quartet --version

Flags of a command: add --help. All flags: docs/flags.md.
With --dry-run a command prints what it would do, and ends.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Target:
    """A command that has a configuration."""

    config: str
    """Class in `quartet.config`."""
    module: str
    """Module whose `main(config) -> int` does the work."""


_TRAIN = {
    "ppo": _Target(config="PpoConfig", module="quartet.trainer.ppo"),
    "sft": _Target(config="SftConfig", module="quartet.trainer.sft"),
    "rm": _Target(config="RmConfig", module="quartet.trainer.rm"),
    "dpo": _Target(config="DpoConfig", module="quartet.trainer.dpo"),
}
_SERVE = {
    "rollout": _Target(config="RolloutServeConfig", module="quartet_rollout.server"),
    "reward": _Target(config="RewardServeConfig", module="quartet_reward.server"),
    "ref": _Target(config="RefServeConfig", module="quartet_ref.server"),
    "learner": _Target(config="LearnerServeConfig", module="quartet_learner.server"),
}
_COMMANDS = ("train", "serve", "data", "probe", "conformance", "tools")
_TOOLS = {
    "gguf-to-hf": ("quartet.tools.gguf_to_hf", "turn a GGUF file into a Hugging Face folder"),
    "merge-lora": ("quartet.tools.merge_lora", "put an adapter into the weights of its base model"),
}


def entry() -> NoReturn:
    """Run the command line and end the process: what `quartet` and `python -m quartet` call."""
    code = main()
    if sys.argv[1:2] == ["serve"]:
        # A service has closed everything when `main` returns. What is left is taking torch apart,
        # which takes seconds on a busy machine and frees what the system frees anyway.
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(args)
    except QuartetError as error:
        _complain(f"error: {error}")
        return error.exit_code if isinstance(error, ConfigError) else EXIT_FAILURE
    except KeyboardInterrupt:
        _complain("interrupted: stopped")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # `quartet train ppo --help | head`: whoever read the output has seen enough.
        with contextlib.suppress(OSError):
            sys.stdout.close()
        return EXIT_FAILURE


def _dispatch(args: Sequence[str]) -> int:
    match args:
        case [] | ["-h" | "--help" | "help", *_]:
            sys.stdout.write(USAGE)
            return 0
        case ["--version" | "version", *_]:
            sys.stdout.write(f"quartet {__version__}\n")
            return 0
        case ["train", *rest]:
            return _configured("train", _TRAIN, rest)
        case ["serve", *rest]:
            return _configured("serve", _SERVE, rest)
        case ["data", *rest]:
            return _data(rest)
        case ["probe", *rest]:
            return _call(import_module("quartet.rpc.probe").main, rest)
        case ["conformance", *rest]:
            return _conformance(rest)
        case ["tools", *rest]:
            return _tool(rest)
        case [unknown, *_]:
            raise _unknown_command("quartet", unknown, list(_COMMANDS))
        case _:
            raise AssertionError(args)


def _configured(command: str, targets: dict[str, _Target], args: Sequence[str]) -> int:
    """Load, check and run `quartet train NAME` or `quartet serve NAME`."""
    if not args or args[0] in ("-h", "--help"):
        sys.stdout.write(
            f"quartet {command} {'|'.join(targets)} [flags]\n\n"
            f"Flags: quartet {command} NAME --help\n"
        )
        return 0 if args else ConfigError.exit_code
    name, *rest = args
    if name not in targets:
        raise _unknown_command(f"quartet {command}", name, list(targets))
    config = import_module("quartet.config")
    settings = getattr(config, targets[name].config)
    if {"-h", "--help"} & set(rest):
        text = import_module("quartet.config.help").help_text(settings, f"quartet {command} {name}")
        sys.stdout.write(text)
        return 0
    load = import_module("quartet.config.load").load
    flags = [word for word in rest if word not in ("--dry-run", "--dry_run")]
    loaded = load(
        settings,
        flags,
        known_elsewhere=[getattr(config, t.config) for t in (*_TRAIN.values(), *_SERVE.values())],
    )
    import_module("quartet.config.validate").validate(loaded.config)
    machine = import_module("quartet.config.machine").this_machine(
        engine_python=import_module("quartet.config.derive").engine_python(loaded.config)
    )
    if len(flags) < len(rest):
        plan = import_module("quartet.config.plan")
        sys.stdout.write(
            plan.render_plan(loaded.config, machine, loaded.origins)
            if command == "train"
            else plan.render_service(loaded.config, machine)
        )
        return 0
    import_module("quartet.config.runnable").require_runnable(loaded.config, machine)
    return _run(command, name, targets[name].module, loaded.config)


def _data(args: Sequence[str]) -> int:
    """Run `quartet data preview METHOD`."""
    match args:
        case ["preview", name, *rest] if name in _TRAIN:
            return _preview(name, rest)
        case ["preview", name, *_] if not name.startswith("-"):
            raise _unknown_command("quartet data preview", name, list(_TRAIN))
        case [] | ["-h" | "--help"] | ["preview"] | ["preview", "-h" | "--help", *_]:
            sys.stdout.write(
                f"quartet data preview {'|'.join(_TRAIN)} [--samples N] [flags]\n\n"
                "Flags: those of quartet train NAME; only those about model and data count\n"
            )
            return 0 if {"-h", "--help"} & set(args) else ConfigError.exit_code
        case [unknown, *_]:
            raise _unknown_command("quartet data", unknown, ["preview"])
        case _:
            raise AssertionError(args)


def _preview(name: str, args: Sequence[str]) -> int:
    """Show what the method `name` would train on. Nothing else of the flags is checked."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--samples", default="3")
    own, flags = parser.parse_known_args(args)
    if not own.samples.isdecimal():
        raise ConfigError(
            f"--samples {own.samples} is no number of samples",
            field="samples",
            value=own.samples,
            remedy="give 0 or more",
        )
    settings = getattr(import_module("quartet.config"), _TRAIN[name].config)
    loaded = import_module("quartet.config.load").load(settings, flags)
    module = import_module("quartet.trainer.preview")
    module.preview(loaded.config, samples=int(own.samples), stream=sys.stdout)
    return 0


def _run(command: str, name: str, module: str, config: object) -> int:
    """Import the worker and hand it the configuration."""
    if find_spec(module.partition(".")[0]) is None or find_spec(module) is None:
        raise ConfigError(
            f"quartet {command} {name} is not in this release",
            field="command",
            value=name,
            remedy="--dry-run shows what it would do",
        )
    try:
        worker = import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing.startswith("quartet"):
            raise
        extra = "trainer" if command == "train" else name
        raise ConfigError(
            f"quartet {command} {name} needs the package {missing}",
            field="command",
            value=name,
            remedy=f"pip install 'quartet-rlhf[{extra}]'",
        ) from error
    return worker.main(config)


def _conformance(args: Sequence[str]) -> int:
    """Run a room's conformance suite against a server."""
    rooms = [room for room in _SERVE if find_spec(f"quartet.testing.conformance.{room}")]
    match args:
        case [room, *rest] if room in rooms:
            command = import_module("quartet.testing.conformance.command")
            return _call(partial(command.run, room), rest)
        case [room, *_] if not room.startswith("-"):
            raise _unknown_command("quartet conformance", room, rooms)
        case _:
            sys.stdout.write(
                f"quartet conformance {'|'.join(rooms)} ADDRESS [flags]\n\n"
                "Checks and flags: quartet conformance ROOM --help\n"
            )
            return 0 if args in (["-h"], ["--help"]) else ConfigError.exit_code


def _tool(args: Sequence[str]) -> int:
    """Run `quartet tools NAME`."""
    if not args or args[0] in ("-h", "--help"):
        lines = [f"  quartet tools {name:<12} {what}\n" for name, (_, what) in _TOOLS.items()]
        sys.stdout.write("".join(lines))
        return 0 if args else ConfigError.exit_code
    name, *rest = args
    if name not in _TOOLS:
        raise _unknown_command("quartet tools", name, list(_TOOLS))
    return _call(import_module(_TOOLS[name][0]).main, rest)


def _call(function: Callable[[Sequence[str]], int], args: Sequence[str]) -> int:
    """Call a small command's own main; its parser ends by SystemExit."""
    try:
        return function(list(args))
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)


def _unknown_command(prefix: str, word: str, known: list[str]) -> ConfigError:
    return ConfigError(
        f"{prefix} {word}: there is no such command",
        field="command",
        value=word,
        remedy=f"there are {', '.join(known)}",
    )


def _complain(line: str) -> None:
    """One line on stderr, also when nobody listens."""
    with contextlib.suppress(OSError):
        sys.stderr.write(line + "\n")

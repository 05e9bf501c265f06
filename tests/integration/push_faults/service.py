"""Starts the services of the fault tests: `python service.py nursery`, or one service alone.

The nursery imports what takes long once, and forks a process for each order it reads: a line of
JSON with the arguments of a `quartet` command, a folder for faults and a file for its output. It
answers with the process id. When its input ends, it ends whatever it started.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from hooks import install

IMPORTS = (
    "quartet.config.checks.serve",
    "quartet.config.load",
    "quartet_learner.conductor",
    "quartet_learner.engine",
    "quartet_learner.server",
    "quartet_rollout.engines.transformers",
    "quartet_rollout.server",
    "transformers.models.llama.modeling_llama",
)
"""What the services would import, each for itself."""


def run(folder: Path, argv: list[str]) -> int:
    """One command of `quartet` with faults; SIGUSR2 prints the stacks of its threads."""
    from quartet.cli import main

    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2)
    install(folder)
    sys.argv = ["quartet", *argv]
    return main(argv)


def nursery() -> None:
    """Fork what is ordered, until the input ends."""
    for name in IMPORTS:
        importlib.import_module(name)
    children: set[int] = set()

    def reap(*_: object) -> None:
        for child in list(children):
            if os.waitpid(child, os.WNOHANG)[0]:
                children.discard(child)

    signal.signal(signal.SIGCHLD, reap)
    print(json.dumps({"pid": os.getpid()}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        child = os.fork()
        if not child:
            _become(order)
        children.add(child)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        print(json.dumps({"pid": child}), flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in children:
        os.kill(child, signal.SIGKILL)


def _become(order: dict) -> None:
    """Be the service that was ordered; never returns."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        code = run(Path(order["folder"]), order["argv"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "nursery":
        nursery()
    else:
        sys.exit(run(Path(sys.argv[1]), sys.argv[2:]))

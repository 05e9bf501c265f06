"""How a process ends: by signal, with its parent, or at once."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import sys
import threading
import time

from quartet.errors import ConfigError

_logger = logging.getLogger(__name__)


def stop_on_signals(stop: asyncio.Event) -> None:
    """Set `stop` at the first SIGTERM or SIGINT; at the second, end the process at once."""
    loop = asyncio.get_running_loop()

    def handle(number: int) -> None:
        if stop.is_set():
            leave(128 + number)
        _logger.info("%s: finishing calls under way", signal.Signals(number).name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle, number)


def die_with_parent(grace: float) -> None:
    """End this process when its parent ends: by SIGTERM, and after `grace` seconds the hard way.

    A thread waits on the parent's pidfd. prctl(PR_SET_PDEATHSIG) would not do: it fires when the
    parent's *thread* that started us ends, and cannot follow with a hard end.

    Raises:
        ConfigError: this system cannot watch a process.
    """
    parent = os.getppid()
    try:
        handle = os.pidfd_open(parent)
    except (AttributeError, OSError) as error:
        raise ConfigError(
            f"rpc.die_with_parent: process {parent} cannot be watched here: {error}",
            field="rpc.die_with_parent",
            value="true",
            remedy="leave it out, and stop the service yourself",
        ) from error
    thread = threading.Thread(target=_follow, args=(handle, grace), daemon=True)
    thread.name = "quartet-parent-watch"
    thread.start()


def _follow(handle: int, grace: float) -> None:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.poll()
    _logger.warning("the process that started this one has ended: stopping")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace)
    leave(1)


def leave(code: int) -> None:
    """End the process now, without waiting for its threads."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

"""A rank other than 0: it loads the model and does what rank 0 does, until it is told to stop."""

from __future__ import annotations

import logging
import os
import sys

from quartet.errors import ConfigError, QuartetError
from quartet.obs import log as logs
from quartet.rpc import lifetime
from quartet_learner.ranks import (
    SETTINGS_VARIABLE,
    STOP,
    CommandChannel,
    launch_of,
    open_store,
)
from quartet_learner.settings import LearnerSettings

log = logging.getLogger(__name__)


def follow(settings: LearnerSettings) -> int:
    """Follow rank 0 to the end; returns the exit code of the process.

    A QuartetError comes to all ranks alike, and rank 0 answers its caller. Anything else may have
    left the other ranks alone in a collective, so this process ends and takes the learner along.
    """
    from quartet_learner.commands import COMMANDS, decode_arguments
    from quartet_learner.engine import LearnerEngine
    from quartet_learner.group import join_group

    launch = launch_of(settings)
    try:
        store = open_store(launch)
        group = join_group(
            store,
            launch.rank,
            launch.world_size,
            tensor_size=settings.tensor_parallel_size,
            ring_size=settings.ring_size,
        )
        engine = LearnerEngine(settings, group)
    except ConfigError as error:
        log.error("rank %d cannot start: %s", launch.rank, error)
        return error.exit_code
    channel = CommandChannel(store, group)
    while True:
        name, messages = channel.receive()
        if name == STOP:
            return 0
        arguments = decode_arguments(name, messages)
        try:
            COMMANDS[name].run(engine, *arguments)
        except QuartetError as error:
            log.info("rank %d: %s was refused: %s", launch.rank, name, error)


def main() -> None:
    """Entry point of the processes that rank 0 starts."""
    logs.configure("learner")
    lifetime.die_with_parent(5.0)
    settings = LearnerSettings.from_json(os.environ.pop(SETTINGS_VARIABLE))
    try:
        code = follow(settings)
    except Exception:
        log.exception("rank %s failed", os.environ.get("RANK"))
        code = 1
    sys.stdout.flush()
    # An orderly end would wait for threads of DeepSpeed and torch that nobody needs any more.
    lifetime.leave(code)


if __name__ == "__main__":
    main()

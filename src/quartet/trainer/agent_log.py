"""Where an agent's words go: what it prints, what it raises, which of its workers were replaced."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quartet.obs.log import PlainFormatter

SPEAKERS = ("quartet.agents", "quartet.workers", "quartet.trainer.episodes")
"""Loggers that speak of agents."""


@contextmanager
def agent_log(folder: Path) -> Iterator[Path]:
    """Have them write to logs/agent.log of a run's folder, beside the services' logs."""
    path = folder / "logs" / "agent.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(PlainFormatter())
    loggers = [logging.getLogger(name) for name in SPEAKERS]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
    try:
        yield path
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate
        handler.close()

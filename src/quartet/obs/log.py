"""Logging: one line an event, with who says it and about which call.

`configure` is called once a process. `bind` names the call at hand; every line logged from the
same task carries those names. Lines are plain text on a terminal and JSON elsewhere; the
environment variable QUARTET_LOG_FORMAT (plain, json) overrides that, QUARTET_LOG_LEVEL the level.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TextIO

from quartet.errors import ConfigError

FIELDS = ("room", "replica", "request_id", "policy_version")
"""Names that `bind` takes, in the order in which lines show them."""

_NOTHING: Mapping[str, str | int] = MappingProxyType({})
_bound: ContextVar[Mapping[str, str | int]] = ContextVar("quartet_log_fields", default=_NOTHING)
_FORMATS = ("plain", "json")


def bind(**fields: str | int) -> None:
    """Name the process or the call at hand in every line of this task, and of tasks it starts.

    Args:
        fields: any of FIELDS; an empty text takes the name away.
    """
    unknown = set(fields) - set(FIELDS)
    if unknown:
        raise TypeError(f"log fields are {', '.join(FIELDS)}, not {', '.join(sorted(unknown))}")
    merged = {**_bound.get(), **fields}
    _bound.set({name: value for name, value in merged.items() if value != ""})


def bound() -> dict[str, str | int]:
    """The names that lines of this task carry."""
    return dict(_bound.get())


class _BoundFields(logging.Filter):
    """Copies the bound names onto the record, while the task that logs is still known."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.quartet = _bound.get()
        return True


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ts, level, logger, the bound names, msg, exc."""

    def format(self, record: logging.LogRecord) -> str:
        """Format one record."""
        moment = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, object] = {
            "ts": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            **getattr(record, "quartet", {}),
            "msg": record.getMessage(),
        }
        if record.exc_info:
            line["exc"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class PlainFormatter(logging.Formatter):
    """`12:00:01 WARNING rollout [request 4f..] text`."""

    def format(self, record: logging.LogRecord) -> str:
        """Format one record; a traceback follows on lines of its own."""
        fields = dict(getattr(record, "quartet", {}))
        room = fields.pop("room", "quartet")
        names = " ".join(f"{name} {value}" for name, value in fields.items())
        parts = [
            datetime.fromtimestamp(record.created).strftime("%H:%M:%S"),
            "" if record.levelno == logging.INFO else record.levelname,
            str(room),
            f"[{names}]" if names else "",
            record.getMessage(),
        ]
        line = " ".join(part for part in parts if part)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def configure(
    room: str, *, style: str = "auto", level: str = "", stream: TextIO | None = None
) -> None:
    """Send this process's log to `stream` (standard error), once; a repeat replaces the first.

    Args:
        room: who speaks: rollout, reward, ref, learner, trainer.
        style: plain, json, or auto: plain on a terminal and JSON elsewhere.
        level: lowest level shown; empty is QUARTET_LOG_LEVEL, or INFO.
        stream: where to.

    Raises:
        ConfigError: an unknown style or level.
    """
    target = sys.stderr if stream is None else stream
    if style == "auto":
        style = os.environ.get("QUARTET_LOG_FORMAT") or ("plain" if target.isatty() else "json")
    if style not in _FORMATS:
        raise _wrong("QUARTET_LOG_FORMAT", style, "plain, json")
    level = level or os.environ.get("QUARTET_LOG_LEVEL") or "INFO"
    levels = logging.getLevelNamesMapping()
    if level.upper() not in levels:
        raise _wrong("QUARTET_LOG_LEVEL", level, ", ".join(levels))
    handler = logging.StreamHandler(target)
    handler.setFormatter(JsonFormatter() if style == "json" else PlainFormatter())
    handler.addFilter(_BoundFields())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Only our own loggers speak below WARNING: libraries are talkative at INFO.
    root.setLevel(logging.WARNING)
    for name in ("quartet", "quartet_rollout", "quartet_reward", "quartet_ref", "quartet_learner"):
        logging.getLogger(name).setLevel(levels[level.upper()])
    bind(room=room)


def _wrong(name: str, value: str, choices: str) -> ConfigError:
    return ConfigError(f"{name} is {value!r}", field=name, value=value, remedy=f"one of {choices}")

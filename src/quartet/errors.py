"""The one exception family, and what each member tells its receiver to do.

`quartet.rpc.errors` maps these to gRPC status and back; nothing else does. To add a failure,
raise one of the four classes with a new `reason`; a new class is only for a new reaction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorInfo:
    """What is known about a failure, beside its sentence."""

    reason: str = ""
    """Stable UPPER_SNAKE_CASE name, for example PROMPT_TOO_LONG."""
    field: str = ""
    """The request field, flag or key at fault, dotted."""
    value: str = ""
    """The value at fault, as text."""
    remedy: str = ""
    """What to change."""
    sample_id: str = ""
    """The sample concerned."""
    replica: str = ""
    """The server that says so."""
    retry_after: float | None = None
    """Seconds after which a repeat may succeed."""


class QuartetError(Exception):
    """Base of all failures that Quartet raises on purpose.

    Attributes:
        message: one sentence for a person.
        info: what else is known.
    """

    error_class: ClassVar[str] = "FATAL"

    def __init__(self, message: str, *, info: ErrorInfo | None = None, **details: str) -> None:
        """Take `info`, or its fields as keywords (`reason=...`, `field=...`)."""
        super().__init__(message)
        self.message = message
        self.info = replace(info or ErrorInfo(), **details)

    def __str__(self) -> str:
        """The sentence, with the place and the remedy when they are known."""
        parts = [self.message]
        if self.info.sample_id:
            parts.append(f"[sample {self.info.sample_id}]")
        if self.info.replica:
            parts.append(f"[{self.info.replica}]")
        if self.info.remedy:
            parts.append(f"({self.info.remedy})")
        return " ".join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        """Stay picklable: reward functions raise these in worker processes."""
        return _rebuild, (type(self), self.message, self.info)


def _rebuild(cls: type[QuartetError], message: str, info: ErrorInfo) -> QuartetError:
    return cls(message, info=info)


class InfraError(QuartetError):
    """The machinery failed: try again, elsewhere if there is another replica."""

    error_class = "INFRA"


class UnavailableError(InfraError):
    """The server is not there, drains, or has no room."""


class DeadlineError(InfraError, TimeoutError):
    """The deadline of a call passed."""


class DataError(QuartetError):
    """One sample cannot be processed: drop it, say so, never try it again."""

    error_class = "DATA"


class RequestError(QuartetError, ValueError):
    """The request is wrong: the message names field, value and remedy."""

    error_class = "REQUEST"


class StateError(RequestError):
    """The server is not in the state that the request supposes (asleep, another version)."""


class FatalError(QuartetError):
    """The run cannot go on."""

    error_class = "FATAL"


class ConfigError(RequestError):
    """A flag, key or file of the user's is wrong. The command line exits with code 2."""

    exit_code = 2

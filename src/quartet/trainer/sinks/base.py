"""What a sink is, and the one that passes everything on to the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

Kind = Literal["train", "eval"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleText:
    """One generated text, for people to read."""

    sample_id: str
    prompt: str
    completion: str
    reward: float
    score: float
    label: Any = ""
    num_tokens: int = 0
    """Tokens of the completion."""
    finish_reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


class Sink(Protocol):
    """Takes numbers and texts. It may buffer; `close` writes what is left."""

    def log(self, kind: Kind, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of one step, by their plain names."""
        ...

    def texts(self, step: int, samples: Sequence[SampleText]) -> None:
        """Take generated texts of one step."""
        ...

    def rewind(self, step: int) -> None:
        """Forget what came after `step`, where that is possible: the run goes on from there."""
        ...

    def close(self) -> None:
        """Write what is buffered and let go of files and connections."""
        ...


class Sinks:
    """Passes everything on to several sinks, and closes all of them whatever one of them does."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        """Take the sinks in the order in which they are written."""
        self._sinks = list(sinks)

    def log(self, kind: Kind, step: int, metrics: Mapping[str, float]) -> None:
        """Pass metrics on."""
        for sink in self._sinks:
            sink.log(kind, step, metrics)

    def texts(self, step: int, samples: Sequence[SampleText]) -> None:
        """Pass texts on."""
        for sink in self._sinks:
            sink.texts(step, samples)

    def rewind(self, step: int) -> None:
        """Rewind all."""
        for sink in self._sinks:
            sink.rewind(step)

    def close(self) -> None:
        """Close all; the first error is raised after the last sink is closed."""
        errors: list[Exception] = []
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:  # one sink's end must not cost another its data
                errors.append(error)
        self._sinks = []
        if errors:
            raise errors[0]


def is_timing(name: str) -> bool:
    """Whether a metric depends on the clock: those are kept apart in deterministic runs."""
    return name.startswith("timing/") or name.endswith(("_seconds", "_per_second"))

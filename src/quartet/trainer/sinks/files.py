"""JSON lines in the run's folder: metrics.jsonl, timings.jsonl and samples.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from quartet.trainer.sinks.base import Kind, SampleText, is_timing


class JsonlSink:
    """Writes one JSON object a step, flushed at once so that a killed run keeps its numbers.

    A row of metrics is {"global_step": int, "kind": "train" or "eval", name: number, ...}; a number
    that is not finite is null, because JSON has no other word for it. With `split_timings`, what
    depends on the clock goes to timings.jsonl, and metrics.jsonl depends on the seed alone.
    """

    def __init__(self, folder: Path, *, split_timings: bool = False, append: bool = False) -> None:
        """Open the files in `folder`, which exists."""
        mode = "a" if append else "w"
        self._metrics = (folder / "metrics.jsonl").open(mode, encoding="utf-8")
        self._samples = (folder / "samples.jsonl").open(mode, encoding="utf-8")
        self._timings: TextIO | None = None
        if split_timings:
            self._timings = (folder / "timings.jsonl").open(mode, encoding="utf-8")

    def log(self, kind: Kind, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step."""
        head: dict[str, Any] = {"global_step": step, "kind": kind}
        if self._timings is None:
            _write(self._metrics, head | _numbers(metrics))
            return
        _write(
            self._metrics, head | _numbers({k: v for k, v in metrics.items() if not is_timing(k)})
        )
        _write(self._timings, head | _numbers({k: v for k, v in metrics.items() if is_timing(k)}))

    def texts(self, step: int, samples: Sequence[SampleText]) -> None:
        """Write one line a sample."""
        for sample in samples:
            _write(self._samples, {"global_step": step, **sample.as_dict()})

    def rewind(self, step: int) -> None:
        """Take the lines of later steps out of all files."""
        for file in self._files():
            path = Path(file.name)
            kept = [
                line
                for line in path.read_text(encoding="utf-8").splitlines(keepends=True)
                # A killed trainer may have left half a line.
                if line.endswith("\n") and json.loads(line)["global_step"] <= step
            ]
            file.truncate(0)
            file.seek(0)
            file.writelines(kept)
            file.flush()

    def close(self) -> None:
        """Close the files."""
        for file in self._files():
            file.close()

    def _files(self) -> list[TextIO]:
        return [f for f in (self._metrics, self._samples, self._timings) if f is not None]


def _numbers(metrics: Mapping[str, float]) -> dict[str, float | None]:
    return {k: float(v) if math.isfinite(v) else None for k, v in sorted(metrics.items())}


def _write(file: TextIO, row: Mapping[str, Any]) -> None:
    file.write(json.dumps(row, ensure_ascii=False) + "\n")
    file.flush()

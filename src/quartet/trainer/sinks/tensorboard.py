"""TensorBoard event files, written without torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from quartet.trainer.sinks.base import Kind, SampleText


class TensorBoardSink:
    """Writes scalars `train/<name>` and `eval/<name>`, and the first sample as text."""

    def __init__(self, folder: Path) -> None:
        """Write event files into `folder`, which is created."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))

    def log(self, kind: Kind, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step as one event."""
        summary = _proto("summary")
        values = [
            summary.Summary.Value(tag=f"{kind}/{name}", simple_value=value)
            for name, value in metrics.items()
        ]
        self._add(step, summary.Summary(value=values))

    def texts(self, step: int, samples: Sequence[SampleText]) -> None:
        """Write the first sample as a text summary."""
        if not samples:
            return
        summary, tensor, types = _proto("summary"), _proto("tensor"), _proto("types")
        first = samples[0]
        text = f"{first.prompt}{first.completion}\n\nreward: {first.reward:.6g}"
        plugin = summary.SummaryMetadata.PluginData(plugin_name="text")
        value = summary.Summary.Value(
            tag="train/generated_samples",
            metadata=summary.SummaryMetadata(plugin_data=plugin),
            tensor=tensor.TensorProto(dtype=types.DT_STRING, string_val=[text.encode()]),
        )
        self._add(step, summary.Summary(value=[value]))

    def rewind(self, step: int) -> None:
        """TensorBoard shows the later of two values of a step."""

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()

    def _add(self, step: int, summary: Any) -> None:
        event = _proto("event").Event(wall_time=time.time(), step=step, summary=summary)
        self._writer.add_event(event)


def _proto(name: str) -> Any:
    """A generated module of TensorBoard's. They come without type stubs, hence Any."""
    return import_module(f"tensorboard.compat.proto.{name}_pb2")

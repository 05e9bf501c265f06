"""Where metrics and sample texts go: files, console, TensorBoard, W&B and Prometheus.

Each is a `Sink`. To add one, write a class with its three methods and a line in `open_sinks`.
"""

from quartet.trainer.sinks.base import SampleText, Sink, Sinks, is_timing
from quartet.trainer.sinks.factory import open_sinks
from quartet.trainer.sinks.files import JsonlSink

__all__ = ["JsonlSink", "SampleText", "Sink", "Sinks", "is_timing", "open_sinks"]

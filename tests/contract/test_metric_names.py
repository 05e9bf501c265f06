"""Metric names keep to Prometheus practice (prometheus.io/docs/practices/naming)."""

from __future__ import annotations

import pytest
from prometheus_client.metrics_core import Metric

from quartet.obs import metrics

OURS = [m for m in metrics.REGISTRY.collect() if not m.name.startswith("process_")]
OTHER_UNITS = ("_milliseconds", "_ms", "_minutes", "_kb", "_mb", "_kilobytes", "_percent")
TYPE_NAMES = ("_counter", "_gauge", "_histogram", "_total")
MANY_VALUES = {"request_id", "sample_id", "group_id", "prompt", "address", "replica", "run_id"}


def test_there_are_some() -> None:
    assert len(OURS) > 10


@pytest.mark.parametrize("metric", OURS, ids=lambda m: m.name)
def test_name(metric: Metric) -> None:
    assert metric.name.startswith("quartet_")
    assert metric.name == metric.name.lower()
    assert metric.documentation.endswith(".")
    assert not metric.name.endswith(OTHER_UNITS), "base units only: seconds, bytes, ratios"
    # The library adds _total to counters; a type in a name says nothing.
    assert not metric.name.endswith(TYPE_NAMES)
    if metric.type == "counter":
        assert metric.name.endswith("s"), "a counter counts things, in the plural"
    if "duration" in metric.name or metric.type == "histogram":
        assert metric.name.endswith(("_seconds", "_bytes", "_tokens", "_versions"))


def test_labels_have_few_values() -> None:
    objects = [value for value in vars(metrics).values() if hasattr(value, "_labelnames")]
    used = {name for metric in objects for name in metric._labelnames}
    assert not used & MANY_VALUES


def test_every_metric_is_declared_in_one_module() -> None:
    declared = {v._name for v in vars(metrics).values() if hasattr(v, "_labelnames")}
    assert {metric.name for metric in OURS} == declared

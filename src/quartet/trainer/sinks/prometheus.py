"""The trainer's own Prometheus metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from quartet.errors import ConfigError
from quartet.obs.metrics import REGISTRY
from quartet.trainer.sinks.base import Kind, SampleText


class PrometheusSink:
    """Serves the latest value of every metric, and totals of steps, samples and drops."""

    def __init__(self, *, host: str, port: int) -> None:
        """Serve on host:port; port 0 takes a free one.

        Raises:
            ConfigError: the port is taken.
        """
        registry = CollectorRegistry()
        # What this process does apart from steps: calls tried again, the version pushed last.
        registry.register(REGISTRY)
        self._value = Gauge(
            "quartet_trainer_metric",
            "Latest value of a metric, by its name in metrics.jsonl.",
            ["kind", "name"],
            registry=registry,
        )
        self._step = Gauge("quartet_trainer_global_step", "Last finished step.", registry=registry)
        self._samples = Counter("quartet_trainer_samples", "Samples trained.", registry=registry)
        self._dropped = Counter(
            "quartet_trainer_samples_dropped", "Samples dropped.", ["reason"], registry=registry
        )
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise ConfigError(
                f"metrics cannot be served on {host}:{port}: {error.strerror}",
                field="metrics.port",
                value=str(port),
                remedy="choose a free port, or 0 for any",
            ) from error
        self.address = f"{host}:{self._server.server_address[1]}"

    def log(self, kind: Kind, step: int, metrics: Mapping[str, float]) -> None:
        """Set the gauges and add to the totals."""
        for name, value in metrics.items():
            self._value.labels(kind, name).set(value)
            if kind == "train" and name.startswith("dropped/"):
                self._dropped.labels(name.removeprefix("dropped/")).inc(value)
        if kind == "train":
            self._step.set(step)
            self._samples.inc(metrics.get("num_samples_trained", 0.0))

    def texts(self, step: int, samples: Sequence[SampleText]) -> None:
        """Texts are no metrics."""

    def rewind(self, step: int) -> None:
        """Gauges show the latest, and totals count what was done."""

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

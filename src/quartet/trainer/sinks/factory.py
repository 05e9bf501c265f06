"""Which sinks a run has, by its flags."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quartet.config import LoggerConfig, MetricsConfig
from quartet.trainer.sinks.base import Sink, Sinks
from quartet.trainer.sinks.console import ConsoleSink
from quartet.trainer.sinks.files import JsonlSink


def open_sinks(
    folder: Path,
    *,
    logger: LoggerConfig,
    metrics: MetricsConfig,
    say: Callable[[str], None],
    deterministic: bool = False,
    append: bool = False,
    config: Mapping[str, Any] | None = None,
) -> Sinks:
    """Open the sinks that the flags ask for; the console and the JSON lines are always there.

    Args:
        folder: The run's folder, which exists.
        logger: W&B and TensorBoard.
        metrics: Prometheus.
        say: Writes a line to the console.
        deterministic: Keep what depends on the clock out of metrics.jsonl.
        append: Add to the files of a run that goes on.
        config: The run's settings without secrets, shown at W&B.

    Raises:
        ConfigError: the Prometheus port is taken.
    """
    sinks: list[Sink] = []
    try:
        if metrics.port is not None:
            from quartet.trainer.sinks.prometheus import PrometheusSink

            prometheus = PrometheusSink(host=metrics.host, port=metrics.port)
            say(f"metrics at http://{prometheus.address}/metrics")
            sinks.append(prometheus)
        sinks.append(JsonlSink(folder, split_timings=deterministic, append=append))
        if logger.tensorboard_dir:
            from quartet.trainer.sinks.tensorboard import TensorBoardSink

            sinks.append(TensorBoardSink(Path(logger.tensorboard_dir) / logger.wandb.run_name))
        if logger.wandb.key or logger.wandb.offline:
            sinks.append(_wandb(folder, logger, config))
    except BaseException:
        Sinks(sinks).close()
        raise
    sinks.append(ConsoleSink(say))
    return Sinks(sinks)


def _wandb(folder: Path, logger: LoggerConfig, config: Mapping[str, Any] | None) -> Sink:
    from quartet.trainer.sinks.wandb import WandbSink

    return WandbSink(
        folder,
        project=logger.wandb.project,
        name=logger.wandb.run_name,
        entity=logger.wandb.org,
        group=logger.wandb.group,
        api_key=logger.wandb.key,
        offline=logger.wandb.offline,
        config=config,
    )

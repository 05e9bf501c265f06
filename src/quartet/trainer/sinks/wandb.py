"""Weights & Biases. `WANDB_MODE=offline` keeps everything in the run's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quartet.trainer.sinks.base import Kind, SampleText

TABLE_ROWS = 8
"""Samples of the table sent with each step."""


class WandbSink:
    """Logs `train/<name>` over `train/global_step` and `eval/<name>` over `eval/global_step`."""

    def __init__(
        self,
        folder: Path,
        *,
        project: str,
        name: str,
        entity: str | None = None,
        group: str | None = None,
        api_key: str | None = None,
        offline: bool = False,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin a W&B run. `config` holds no secrets; `api_key` is used to log in and not kept."""
        import wandb

        self._wandb = wandb
        settings = wandb.Settings(api_key=api_key) if api_key else wandb.Settings()
        # None leaves the choice to WANDB_MODE.
        mode = "offline" if offline else None
        self._run = wandb.init(
            dir=str(folder),
            project=project,
            name=name,
            entity=entity,
            group=group,
            config=dict(config or {}),
            settings=settings,
            mode=mode,
        )
        for kind in ("train", "eval"):
            self._run.define_metric(f"{kind}/global_step")
            self._run.define_metric(f"{kind}/*", step_metric=f"{kind}/global_step")

    def log(self, kind: Kind, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of one step."""
        row = {f"{kind}/{name}": value for name, value in metrics.items()}
        self._run.log({f"{kind}/global_step": step, **row})

    def texts(self, step: int, samples: Sequence[SampleText]) -> None:
        """Log a table of the first samples of this step, not of all steps so far."""
        columns: list[Any] = ["global_step", "prompt", "completion", "reward"]
        rows: list[Any] = [[step, s.prompt, s.completion, s.reward] for s in samples[:TABLE_ROWS]]
        table = self._wandb.Table(columns=columns, data=rows)
        self._run.log({"train/global_step": step, "train/generated_samples": table})

    def rewind(self, step: int) -> None:
        """W&B keeps both; the axis train/global_step shows them one above the other."""

    def close(self) -> None:
        """Upload or write the rest, and end the W&B run and its helper process."""
        self._run.finish()
        # Else the helper lives, and may still write, until this process ends.
        self._wandb.teardown()

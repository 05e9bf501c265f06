"""Sections `ckpt`, `logger`, `run` and `push`: what a run leaves behind, and how weights travel."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class CkptConfig:
    """Checkpoints and the final model."""

    output_dir: str = "./ckpt"
    """Folder of the final model, in Hugging Face format."""
    path: str = "./ckpt/checkpoints"
    """Folder of checkpoints from which a run can go on."""
    save_steps: int = -1
    """Write a checkpoint each N steps; -1 never."""
    save_hf: bool = False
    """With each checkpoint, write the model in Hugging Face format too."""
    disable_ds: bool = False
    """Do not write checkpoints from which a run can go on."""
    max_num: int = 3
    """Checkpoints to keep."""
    max_mem: float = 100_000_000
    """Most GiB of all checkpoints together."""
    load_enable: bool = False
    """Go on from the latest checkpoint under `path`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PpoCkptConfig(CkptConfig):
    """Checkpoints of PPO, of which the best can be kept too."""

    path: str = "./ckpt/checkpoints_ppo_ray"
    """Folder of checkpoints from which a run can go on: _actor and _critic are below it."""
    max_mem: float = float("inf")
    """Most GiB of all checkpoints together."""
    best_metric_key: str = ""
    """Metric of the evaluation whose highest value marks the best checkpoint. Empty: the first
    that ends in _pass1; none: no best checkpoint."""


def _stamped(prefix: str) -> str:
    """`prefix` with the time: what the incumbent calls a run."""
    return f"{prefix}_{time.strftime('%m%dT%H:%M')}"


@dataclass(frozen=True, kw_only=True, slots=True)
class WandbConfig:
    """Weights & Biases."""

    key: str | None = field(default=None, repr=False)
    """API key; given, metrics go to W&B. Better kept in the environment, as
    QUARTET_LOGGER__WANDB__KEY: other users of the machine can read a command line."""
    offline: bool = False
    """Write W&B files into the run's folder, to be uploaded later; needs no key."""
    org: str | None = None
    """Entity."""
    group: str | None = None
    """Group."""
    project: str = "quartet"
    """Project."""
    run_name: str = field(default_factory=partial(_stamped, "run"))
    """Name of the run at W&B, and sub-folder at TensorBoard."""


def wandb_defaults(project: str, prefix: str) -> WandbConfig:
    """The section with a method's own project and run name."""
    return WandbConfig(project=project, run_name=_stamped(prefix))


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggerConfig:
    """Where metrics go, besides the console and the run's metrics.jsonl."""

    logging_steps: int = 1
    """Log each N steps."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    """Weights & Biases."""
    tensorboard_dir: str | None = None
    """Folder of TensorBoard events; given, they are written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Where a run keeps its ledger, logs, metrics and report: `<dir>/<name>`."""

    dir: str = "./runs"
    """Folder of runs."""
    name: str = field(default_factory=lambda: time.strftime("run_%m%dT%H%M%S"))
    """Name of the run; its folder."""

    @property
    def folder(self) -> Path:
        """The folder of this run."""
        return Path(self.dir) / self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class PushConfig:
    """How the policy's weights get from the learner to the rollout services."""

    backend: Literal["auto", "nccl", "gloo", "ipc", "file"] = "auto"
    """Transport. auto: nccl between GPUs, ipc where learner and engine share one GPU, else gloo."""
    bucket_bytes: int = 256 * 1024 * 1024
    """Weights sent in one collective."""
    group_timeout: float = 120.0
    """Seconds that any wait of a push may take before it is given up."""

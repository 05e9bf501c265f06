"""What earlier runs left on the disk, as far as it stands in the way of a new one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from quartet.config.methods import PpoConfig, TrainerConfig
from quartet.config.tree import wrong
from quartet.errors import ConfigError


def in_the_way(config: TrainerConfig) -> Iterator[ConfigError]:
    """A run folder that is taken, or checkpoints to go on from that are not there."""
    folder = config.run.folder
    if (folder / "ledger.sqlite").exists() and not config.ckpt.load_enable:
        yield wrong(
            "run.name",
            config.run.name,
            f"{folder} already holds a run",
            "choose another --run.name, or remove the folder",
        )
    # A learner at an address has its checkpoints on its own machine.
    if config.ckpt.load_enable and not config.learner.address and not _has_checkpoint(config):
        yield wrong(
            "ckpt.path",
            config.ckpt.path,
            "there is no checkpoint to go on from",
            "give the --ckpt.path of the run to go on with, or leave --ckpt.load_enable away",
        )


def _has_checkpoint(config: TrainerConfig) -> bool:
    path = Path(config.ckpt.path).expanduser()
    folder = path / "_actor" if isinstance(config, PpoConfig) else path
    return any(folder.glob("global_step*/checkpoint.json"))

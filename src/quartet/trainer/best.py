"""The best checkpoint: of the weights that an evaluation rated highest, and only that one.

    <ckpt.path>/best/_actor/best_global_step8   _critic beside it
    <ckpt.path>/best/best_global_step8_hf       with --ckpt.save_hf
    <ckpt.path>/best/best.json                  metric, value and step

It has a folder of its own, so the latest checkpoint stays the one to go on from; with
`--ckpt.path <ckpt.path>/best` a run goes on from the best one instead. The new one is whole before
best.json names it, and the old one is removed after that.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quartet.config import PpoCkptConfig, PpoConfig
from quartet.errors import ConfigError
from quartet.obs.progress import Progress
from quartet.trainer.checkpoints import Checkpoints
from quartet.trainer.evaluate import is_pass_at_k, metric_names
from quartet.trainer.metrics import Metrics
from quartet.trainer.run import absolute

WITHIN = "best"
"""Folder below `ckpt.path`."""

MOST_FAILED = 0.1
"""Share of samples that may have failed in an evaluation that chooses a checkpoint. With more of
them the mean is over other prompts than before, and says little about the weights."""

_FOLDER = re.compile(r"(replaced_)?best_global_step\d+(_hf)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The best evaluation so far."""

    key: str
    """The metric."""
    value: float
    step: int


def best_key(config: PpoConfig, sources: Iterable[str]) -> str | None:
    """The metric whose highest value marks the best checkpoint; None where none is kept.

    Args:
        config: all flags.
        sources: the data sources of the prompts that are evaluated; empty without evaluation.

    Raises:
        ConfigError: no evaluation can have the metric that the flag names.
    """
    key, ckpt = config.ckpt.best_metric_key, config.ckpt
    names = metric_names(sources, num_samples=config.eval.n_samples_per_prompt)
    first = sorted(name for name in names if name.endswith("_pass1"))
    if key == "none" or not first or (ckpt.disable_ds and not ckpt.save_hf):
        return None
    if not key:
        return first[0]
    if key not in names:
        raise _unknown(key, names)
    return key


class BestCheckpoint:
    """Looks at each evaluation, and has the learners save when it is the best so far."""

    def __init__(
        self,
        config: PpoCkptConfig,
        key: str,
        checkpoints: Checkpoints,
        *,
        progress: Progress,
    ) -> None:
        """Keep the checkpoint with the highest `key`, written by `checkpoints`."""
        self._folder = Path(absolute(config.path)) / WITHIN
        self._key = key
        self._checkpoints = checkpoints
        self._progress = progress
        self._checked = False
        self.best: Best | None = None

    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Go on with the best of the run so far.

        best.json wins over `saved`, which is from the checkpoint that the run goes on from: it may
        be of an evaluation after that checkpoint, whose weights are there all the same.
        """
        record = _read(self._folder / "best.json") or saved
        if record is None:
            return
        best = Best(**record)
        if best.key == self._key:
            self.best = best
        else:
            # The flag says what is best from now on, whatever the checkpoint says.
            self._progress.say(
                f"the best checkpoint was chosen by {best.key} so far, from now on by {self._key}"
            )

    async def consider(self, step: int, metrics: Metrics, state: Mapping[str, Any]) -> None:
        """Save the learners as they are, which `metrics` were measured on, if that is the best.

        Args:
            step: the step just done.
            metrics: of the evaluation after it.
            state: the trainer's, to go on from there.

        Raises:
            ConfigError: it turns out that no evaluation of this run has the metric.
        """
        self._check(metrics)
        value = metrics.get(self._key)
        failed, scored = metrics["eval_num_failed"], metrics["eval_num_samples"]
        if value is None or failed > MOST_FAILED * (failed + scored):
            self._progress.say(
                f"step {step}: {failed:g} of {failed + scored:g} samples failed, so the evaluation "
                "chooses no checkpoint"
            )
            return
        if self.best is not None and value <= self.best.value:
            return
        best = Best(key=self._key, value=value, step=step)
        tag = f"best_global_step{step}"
        with self._progress.phase(f"step {step} best checkpoint") as phase:
            phase.note = f"{self._key} {value:.4f}"
            await asyncio.to_thread(self._make_room, tag)
            await self._checkpoints.write(tag, {**state, "best": asdict(best)}, within=WITHIN)
            await asyncio.to_thread(_write, self._folder / "best.json", asdict(best))
            self.best = best
            await asyncio.to_thread(self._remove_others, tag)

    @property
    def state(self) -> dict[str, Any] | None:
        """For checkpoints and ledger: what `restore` takes."""
        return None if self.best is None else asdict(self.best)

    def _check(self, metrics: Metrics) -> None:
        """At the first evaluation with scores: pass@k is there only where they are 0 or 1."""
        if self._checked or not metrics["eval_num_samples"]:
            return
        self._checked = True
        if is_pass_at_k(self._key) and self._key not in metrics:
            raise _unknown(self._key, {name for name in metrics if name.startswith("eval_")})

    def _make_room(self, tag: str) -> None:
        """Put aside what has the name already: a save after which the run was killed."""
        for path in self._found():
            if path.name == tag:
                aside = path.with_name(f"replaced_{tag}")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)

    def _remove_others(self, tag: str) -> None:
        for path in self._found():
            if path.name not in (tag, f"{tag}_hf"):
                shutil.rmtree(path, ignore_errors=True)

    def _found(self) -> list[Path]:
        """Checkpoints that this machine sees."""
        paths = [*self._folder.glob("*"), *self._folder.glob("_*/*")]
        return [path for path in paths if _FOLDER.fullmatch(path.name)]


def _unknown(key: str, names: Iterable[str]) -> ConfigError:
    return ConfigError(
        f"--ckpt.best_metric_key {key}: no evaluation of this run has it",
        reason="METRIC_UNKNOWN",
        field="ckpt.best_metric_key",
        value=key,
        remedy=f"give one of {', '.join(sorted(names))}; or none",
    )


def _read(file: Path) -> dict[str, Any] | None:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def _write(file: Path, record: Mapping[str, Any]) -> None:
    """Replace the file as a whole, and durably."""
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_suffix(".tmp")
    with aside.open("w", encoding="utf-8") as stream:
        json.dump(record, stream)
        stream.flush()
        os.fsync(stream.fileno())
    aside.replace(file)

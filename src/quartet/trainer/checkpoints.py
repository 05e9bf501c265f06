"""Checkpoints of a run: written by the learners, named and counted here.

    <ckpt.path>/global_step8            SFT, RM
    <ckpt.path>/_actor/global_step8     PPO; _critic beside it
    <ckpt.path>/global_step8_hf         with --ckpt.save_hf, the model for transformers
    <ckpt.path>/best                    PPO: the best one by evaluation, see `best`

Each carries the trainer's state: where the run stood, and the settings by which it counts. An old
one is removed only when the new one is whole.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quartet.config import CkptConfig
from quartet.errors import ConfigError, RequestError
from quartet.obs.progress import Progress
from quartet.trainer.rooms import Trainee
from quartet.trainer.run import absolute

_TAG = re.compile(r"global_step(\d+)(_hf)?")
_GIB = float(1 << 30)


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """A checkpoint that was loaded."""

    state: dict[str, Any]
    """As given to `save`."""
    optimizer_steps: dict[str, int]
    """Optimizer steps behind each learner, by role."""
    run_ids: dict[str, str]
    """The run that each learner goes on with, by role."""


class Checkpoints:
    """Saves all learners of a run at the same step, and loads them from the same step."""

    def __init__(
        self,
        config: CkptConfig,
        learners: Mapping[str, tuple[Trainee, str]],
        *,
        run_id: str,
        counted_by: Mapping[str, Any],
        begun_with: Mapping[str, Any],
        progress: Progress,
        before_write: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Look after the checkpoints of a run.

        Args:
            config: the flags.
            learners: by role, the learner and its folder below `ckpt.path`; the first one's model
                is what save_hf exports.
            run_id: begins the request ids.
            counted_by: settings by which steps are counted; a checkpoint with others is refused.
            begun_with: settings that learners are told when a run begins; where they are others
                in a checkpoint, its own hold, and that is said.
            progress: where to say what is done.
            before_write: wakes the learners, where they sleep.
        """
        self._before_write = before_write
        self._config = config
        self._path = Path(absolute(config.path))
        self._learners = dict(learners)
        self._run_id = run_id
        self._counted_by = dict(counted_by)
        # As they come back from a checkpoint: tuples are lists in JSON.
        self._begun_with: dict[str, Any] = json.loads(json.dumps(dict(begun_with)))
        self._progress = progress

    async def after_step(self, step: int, state: Mapping[str, Any]) -> None:
        """Save after `step`, if it is the turn of one, and remove what is too old."""
        every = self._config.save_steps
        if every <= 0 or step % every:
            return
        tag = f"global_step{step}"
        with self._progress.phase(f"step {step} checkpoint") as phase:
            phase.note = tag
            await self.write(tag, state)
            await asyncio.to_thread(self._rotate)

    async def write(self, tag: str, state: Mapping[str, Any], *, within: str = "") -> None:
        """Have the learners write checkpoint `tag`, and its copy for transformers, by the flags.

        Args:
            tag: name of the checkpoint.
            state: the trainer's; `restore` gives it back.
            within: folder below `ckpt.path`.
        """
        if self._before_write is not None:
            await self._before_write()
        path = self._path / within
        name = f"{within}/{tag}" if within else tag
        if not self._config.disable_ds:
            kept = {
                "state": dict(state),
                "counted_by": self._counted_by,
                "begun_with": self._begun_with,
            }
            # One after the other: the last one written is whole only if all before are.
            for role, (trainee, below) in self._learners.items():
                await trainee.save_checkpoint(
                    request_id=f"{self._run_id}/{role}/{name}",
                    folder=str(path / below),
                    tag=tag,
                    trainer_state=json.dumps(kept).encode(),
                )
        if self._config.save_hf:
            trainee, _ = next(iter(self._learners.values()))
            await trainee.export_model(
                request_id=f"{self._run_id}/hf/{name}", folder=str(path / f"{tag}_hf")
            )

    async def restore(self) -> Restored:
        """Load the latest checkpoint that all learners have.

        Raises:
            ConfigError: there is none, or it belongs to a run that counts its steps otherwise.
        """
        tag = ""
        state: dict[str, Any] = {}
        steps: dict[str, int] = {}
        run_ids: dict[str, str] = {}
        # Backwards: what the last one has, those saved before it have too.
        for role, (trainee, below) in reversed(self._learners.items()):
            folder = str(self._path / below)
            try:
                loaded = await trainee.load_checkpoint(folder=folder, tag=tag)
            except RequestError as error:
                raise ConfigError(
                    f"the {role} cannot go on from {folder}: {error.message}",
                    reason=error.info.reason,
                    field="ckpt.load_enable",
                    value="True",
                    remedy=error.info.remedy or "start without --ckpt.load_enable",
                ) from error
            tag, state = loaded.tag, json.loads(loaded.trainer_state)
            steps[role], run_ids[role] = loaded.optimizer_steps, loaded.run_id
        self._check(tag, state["counted_by"])
        self._progress.say(f"going on from checkpoint {tag}")
        self._go_on_with(state.get("begun_with", {}))
        return Restored(state=state["state"], optimizer_steps=steps, run_ids=run_ids)

    def _check(self, tag: str, counted_by: Mapping[str, Any]) -> None:
        for name, value in self._counted_by.items():
            if counted_by.get(name) != value:
                raise ConfigError(
                    f"checkpoint {tag} was made with {name} {counted_by.get(name)}, now it is "
                    f"{value}, so its steps do not count the same",
                    reason="CHECKPOINT_OF_OTHER_SETTINGS",
                    field=name,
                    value=str(value),
                    remedy=f"set {name} back, or start without --ckpt.load_enable",
                )

    def _go_on_with(self, there: Mapping[str, Any]) -> None:
        """Say which settings are those of the checkpoint, and keep them for the next one."""
        for name, value in self._begun_with.items():
            if there.get(name, value) != value:
                kept = f"the run goes on with {there[name]}, as it began"
                self._progress.say(f"note: {name}: {value} now, but {kept}")
        self._begun_with |= there

    def _rotate(self) -> None:
        """Remove the oldest until count and size are within the flags; the newest stays.

        A learner on another machine has its checkpoints there; what is not seen is not counted.
        """
        folders = {self._path / below for _, below in self._learners.values()} | {self._path}
        by_step: dict[int, list[Path]] = {}
        for folder in folders:
            for path in folder.glob("global_step*") if folder.is_dir() else ():
                if match := _TAG.fullmatch(path.name):
                    by_step.setdefault(int(match[1]), []).append(path)
        sizes = {step: sum(map(_size, paths)) for step, paths in by_step.items()}
        kept = sorted(by_step)
        while len(kept) > 1 and (
            len(kept) > self._config.max_num
            or sum(sizes[s] for s in kept) > self._config.max_mem * _GIB
        ):
            for path in by_step[kept.pop(0)]:
                shutil.rmtree(path, ignore_errors=True)


def _size(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

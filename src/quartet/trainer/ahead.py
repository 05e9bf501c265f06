"""Rollouts made ahead of training: a producer that keeps in order, in bounds, and loses nothing.

    prompts in order -> groups -> rows of one rollout each -> [queue] -> learners evaluate -> train

Two bounds hold the producer back. No more than `queue_size` rollouts are in the making or wait to
be trained. And a prompt is drawn only when its groups cannot be older than `max_staleness` versions
when their turn to be trained comes; so nothing has to be thrown away for its age.

What belongs to a step does not depend on how far ahead anything is: it is the shortest row of
prompts that holds enough groups, as in a run without this. What was generated beyond it waits for
the next step. A checkpoint remembers the end of the last trained row, and a run that goes on from
there draws everything behind it again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from quartet.obs.progress import Phase, Progress
from quartet.trainer.drops import Drops
from quartet.trainer.experience import Group
from quartet.trainer.filtering import PromptCursor, pass_rate
from quartet.trainer.ledger import DroppedSample, Ledger
from quartet.trainer.pipeline import Pipeline, Rollout
from quartet.trainer.pushes import Pushes
from quartet.trainer.seeds import sample_id
from quartet.trainer.sources import Work, plan_of
from quartet.trainer.staleness import STALE, capacity, is_stale, staleness_metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class AheadSettings:
    """How far generation runs ahead."""

    batch_size: int
    """Prompt groups of a rollout."""
    num_samples: int
    """Samples of a group."""
    queue_size: int
    """Rollouts that are made or wait at once."""
    max_staleness: int
    """Versions that a token may be old when it is trained."""
    generate_size: int
    """Prompts that are drawn at once; above `batch_size` the rest waits for the next step."""
    filtering: bool = False
    """Groups without samples do not count: others take their places."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Row:
    """The groups of one rollout, on their way to the learners."""

    episode: int
    first: int
    """Number of the first prompt in the pass."""
    groups: list[Group]
    consumed: int
    """Prompts of all passes up to the end of the row."""
    generation_seconds: float
    seconds: float


class Ahead:
    """Makes rollouts while others are trained. See the module's text for its rules."""

    def __init__(
        self,
        settings: AheadSettings,
        pipeline: Pipeline,
        cursor: PromptCursor,
        *,
        pushes: Pushes,
        ledger: Ledger,
        drops: Drops,
        progress: Progress,
    ) -> None:
        """Make rollouts of the prompts of `cursor`."""
        self._settings = settings
        self._pipeline = pipeline
        self._cursor = cursor
        self._pushes = pushes
        self._ledger = ledger
        self._drops = drops
        self._progress = progress
        self._places = asyncio.Semaphore(settings.queue_size)
        self._ready: asyncio.Queue[_Row | None] = asyncio.Queue()
        """Rows in order, then None at the end of the data."""
        self._num_ready = 0
        """Rows among them."""
        self._left: list[Group] = []
        """Groups that were made and belong to no row yet, in order."""
        self._episode = 0
        """The pass that they belong to."""
        self._num_trained, self._last = 0, 0
        self._moved = asyncio.Event()
        """Set when a step was trained."""
        self._doing = ""
        """What the producer does, for those who wait for it."""
        self._waiting: Phase | None = None
        """Where it is said that the learners wait."""

    @asynccontextmanager
    async def running(self, first: int, last: int) -> AsyncGenerator[None]:
        """Produce while the context lasts. A failure of either side ends the other at once."""
        self._num_trained, self._last = first - 1, last
        async with asyncio.TaskGroup() as tasks:
            producer = tasks.create_task(self._produce(first, last))
            yield
            producer.cancel()

    async def take(self, step: int) -> Work | None:
        """Wait for the rollout of step `step`, and have the learners evaluate it."""
        began = time.monotonic()
        row = await self._wait(step)
        if row is None:
            return None
        waited = time.monotonic() - began
        self._num_ready -= 1
        depth = self._num_ready
        self._places.release()
        version = self._pushes.policy_version
        plan = plan_of(row.episode, row.first, [group.prompt for group in row.groups])
        await self._ledger.begin_step(step, policy_version=version, plan=plan)
        await self._drop_stale(row.groups, version)
        began = time.monotonic()
        experience = await self._pipeline.finish(row.groups)
        accepted = sum(1 for group in row.groups if group.samples)
        filtering = self._settings.filtering
        rollout = Rollout(
            experience=experience,
            dropped=await self._ledger.drop_reasons(step),
            generation_seconds=row.generation_seconds,
            seconds=row.seconds + time.monotonic() - began,
            pass_rate=(pass_rate(accepted=accepted, drawn=len(row.groups)) if filtering else None),
        )
        return Work(
            rollout=rollout,
            episode=row.episode,
            consumed=row.consumed,
            metrics={
                **staleness_metrics(experience.samples, version),
                "rollout/queue_depth": float(depth),
                "timing/queue_wait": waited,
            },
        )

    def trained(self, step: int) -> None:
        """Let groups be made that would have been too old before."""
        self._num_trained = step
        self._moved.set()

    async def _wait(self, step: int) -> _Row | None:
        if self._ready.qsize():
            return self._ready.get_nowait()
        with self._progress.phase(f"step {step} wait") as self._waiting:
            self._say(self._doing)
            try:
                return await self._ready.get()
            finally:
                self._waiting = None

    def _say(self, doing: str) -> None:
        """Note what the producer does or waits for."""
        self._doing = doing
        if self._waiting is not None:
            self._waiting.waiting_for = doing

    async def _produce(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self._say(f"a place in the queue of {self._settings.queue_size}")
            await self._places.acquire()
            row = await self._make(step)
            if row is None:
                break
            self._num_ready += 1
            self._ready.put_nowait(row)
        self._ready.put_nowait(None)

    async def _make(self, step: int) -> _Row | None:
        """Draw and gather until there is a row; None when the data has ended."""
        began, generation_seconds = time.monotonic(), 0.0
        while (missing := self._settings.batch_size - self._counted(self._left)) > 0:
            count = await self._room(step, missing)
            draw = self._cursor.draw(count, episode=self._episode if self._left else None)
            if not draw.prompts:
                break
            self._episode = draw.episode
            self._say(f"{len(draw.prompts)} prompts of step {step}, rollout and reward")
            groups, seconds = await self._pipeline.gather(
                step,
                draw.prompts,
                first=draw.first,
                episode=draw.episode,
                policy_version=self._pushes.policy_version,
            )
            generation_seconds += seconds
            self._left += groups
        if not self._left:
            return None
        row, self._left = self._cut(self._left)
        # What is beyond the row will be closed with a later step.
        await self._ledger.move(step + 1, self._sample_ids(self._left))
        return _Row(
            episode=self._episode,
            first=row[0].index,
            groups=row,
            consumed=self._cursor.consumed - len(self._left),
            generation_seconds=generation_seconds,
            seconds=time.monotonic() - began,
        )

    async def _room(self, step: int, missing: int) -> int:
        """How many prompts to draw now; waits until it is at least one."""
        settings = self._settings
        # No more than the steps that are left can train.
        useful = min(settings.generate_size, (self._last - step + 1) * settings.batch_size)
        wanted = max(missing, useful - len(self._left))
        while True:
            # Steps are trained in order: those before this one count as full, whatever they held.
            room = capacity(
                max_concurrent=wanted,
                running=0,
                max_staleness=settings.max_staleness,
                version=self._num_trained,
                batch_size=settings.batch_size,
                accepted=(step - 1) * settings.batch_size + self._counted(self._left),
            )
            if room > 0:
                return room
            self._say(f"step {self._num_trained + 1} to be trained (train.max_staleness)")
            self._moved.clear()
            await self._moved.wait()

    def _counted(self, groups: Sequence[Group]) -> int:
        """Groups that take a place in a rollout."""
        if not self._settings.filtering:
            return len(groups)
        return sum(1 for group in groups if group.samples)

    def _cut(self, groups: list[Group]) -> tuple[list[Group], list[Group]]:
        """The shortest row that holds a rollout, or all there is; and the rest."""
        counted = 0
        for number, group in enumerate(groups, start=1):
            counted += self._counted([group])
            if counted == self._settings.batch_size:
                return groups[:number], groups[number:]
        return groups, []

    def _sample_ids(self, groups: Sequence[Group]) -> list[str]:
        """Names of all samples that were asked for, dropped ones included."""
        return [
            sample_id(episode=self._episode, prompt_id=group.prompt.prompt_id, index=index)
            for group in groups
            for index in range(self._settings.num_samples)
        ]

    async def _drop_stale(self, groups: Sequence[Group], policy_version: int) -> None:
        """Drop groups with a sample that is too old.

        The bound on drawing keeps their number at 0, unless a replica gave older weights than it
        was asked for.
        """
        most = self._settings.max_staleness
        for group in groups:
            old = [s for s in group.samples if is_stale(s, policy_version, max_staleness=most)]
            if not old:
                continue
            message = (
                f"{old[0].sample_id} has tokens of version {old[0].first_policy_version} from "
                f"{old[0].replica}, and version {policy_version} is trained"
            )
            await self._ledger.dropped(
                [
                    DroppedSample(sample_id=s.sample_id, reason=STALE, message=message)
                    for s in group.samples
                ]
            )
            for _ in group.samples:
                self._drops.drop(STALE, message)
            group.samples = []

"""Where the loop gets its rollouts from: made in turn with training, or `ahead` of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from quartet.data.samples import Prompt
from quartet.trainer.filtering import PromptCursor
from quartet.trainer.ledger import Ledger
from quartet.trainer.metrics import Metrics
from quartet.trainer.pipeline import Pipeline, Rollout
from quartet.trainer.pushes import Pushes


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Work:
    """A rollout whose turn to be trained has come."""

    rollout: Rollout
    episode: int
    """The pass over the data that its prompts belong to."""
    consumed: int
    """Prompts of all passes that are behind the run once this rollout is trained: where a run
    goes on from a checkpoint made then."""
    metrics: Metrics = field(default_factory=dict)
    """What there is to say of how it came about."""


class Source(Protocol):
    """Gives the loop one rollout after the other."""

    def running(self, first: int, last: int) -> AbstractAsyncContextManager[None]:
        """Be at work on the rollouts of steps `first` to `last` while the context lasts."""
        ...

    async def take(self, step: int) -> Work | None:
        """The rollout of step `step`, recorded as begun; None when the data has ended."""
        ...

    def trained(self, step: int) -> None:
        """Hear that step `step` is trained and its weights are pushed."""
        ...


def plan_of(episode: int, first: int, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """What the ledger keeps of a step's prompts."""
    return {"episode": episode, "first": first, "prompt_ids": [p.prompt_id for p in prompts]}


class InTurn:
    """Makes each rollout when it is asked for, with the weights that were pushed last."""

    def __init__(
        self,
        pipeline: Pipeline,
        cursor: PromptCursor,
        *,
        batch_size: int,
        pushes: Pushes,
        ledger: Ledger,
    ) -> None:
        """Make rollouts of `batch_size` prompts of `cursor` each."""
        self._pipeline = pipeline
        self._cursor = cursor
        self._batch_size = batch_size
        self._pushes = pushes
        self._ledger = ledger

    @asynccontextmanager
    async def running(self, first: int, last: int) -> AsyncGenerator[None]:
        """Nothing is done unless it is asked for."""
        del first, last
        yield

    async def take(self, step: int) -> Work | None:
        """Make the rollout of step `step`."""
        draw = self._cursor.draw(self._batch_size)
        if not draw.prompts:  # a filter consumes more prompts a step
            return None
        version = self._pushes.policy_version
        plan = plan_of(draw.episode, draw.first, draw.prompts)
        await self._ledger.begin_step(step, policy_version=version, plan=plan)
        rollout = await self._pipeline.make(
            step,
            draw.prompts,
            episode=draw.episode,
            policy_version=version,
            more=lambda count: self._cursor.draw(count, episode=draw.episode).prompts,
        )
        return Work(rollout=rollout, episode=draw.episode, consumed=self._cursor.consumed)

    def trained(self, step: int) -> None:
        """Nobody waits for it."""
        del step

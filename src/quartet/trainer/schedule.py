"""How many rollouts and optimizer steps a run has, and which prompts each rollout takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from quartet.config import PpoConfig
from quartet.data.samples import epoch_order

Row = TypeVar("Row")


def ceil_div(total: int, size: int) -> int:
    """Number of parts of at most `size` that `total` falls into."""
    return -(-total // size)


@dataclass(frozen=True, kw_only=True, slots=True)
class PpoSchedule:
    """The counts of a PPO run, known before it starts."""

    num_prompts: int
    rollout_batch_size: int
    """Prompts of a rollout; the last of an episode may be smaller, and is trained too."""
    samples_per_prompt: int
    train_batch_size: int
    """Samples of an optimizer step; the last of a rollout may be smaller."""
    max_epochs: int = 1
    """Passes over each rollout."""
    num_episodes: int = 1
    """Passes over the prompts."""
    max_rollouts: int | None = None
    """Stop after so many."""
    freezing_steps: int = 0
    """Rollouts on which only the critic is trained."""

    def rollout_sizes(self) -> list[int]:
        """Prompts of each rollout, in order."""
        full, rest = divmod(self.num_prompts, self.rollout_batch_size)
        episode = [self.rollout_batch_size] * full + ([rest] if rest else [])
        return (episode * self.num_episodes)[: self.max_rollouts]

    @property
    def num_rollouts(self) -> int:
        """Rollouts of the run."""
        return len(self.rollout_sizes())

    @property
    def critic_steps(self) -> int:
        """Optimizer steps of the critic."""
        return sum(self._steps_of(size) for size in self.rollout_sizes())

    @property
    def policy_steps(self) -> int:
        """Optimizer steps of the policy."""
        return sum(self._steps_of(size) for size in self.rollout_sizes()[self.freezing_steps :])

    def _steps_of(self, prompts: int) -> int:
        samples = prompts * self.samples_per_prompt
        return ceil_div(samples, self.train_batch_size) * self.max_epochs


def schedule_of(config: PpoConfig, num_prompts: int) -> PpoSchedule:
    """The counts of a run on so many prompts."""
    return PpoSchedule(
        num_prompts=num_prompts,
        rollout_batch_size=config.rollout.batch_size,
        samples_per_prompt=config.rollout.n_samples_per_prompt,
        train_batch_size=config.train.batch_size,
        max_epochs=config.train.max_epochs,
        num_episodes=config.train.num_episodes,
        max_rollouts=config.train.max_steps,
        freezing_steps=max(0, config.critic.freezing_steps),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch(Generic[Row]):
    """Rows that belong together in one pass over the data."""

    epoch: int
    """Number of the pass, from 0."""
    index: int
    """Number of the batch in the pass, from 0."""
    rows: tuple[Row, ...]


class SeededBatches(Generic[Row]):
    """Passes over rows: a new order each, decided by the seed and the number of the pass alone.

    The last batch of a pass may be smaller; no row is left out, and none comes twice in a pass.
    """

    def __init__(self, rows: Sequence[Row], *, batch_size: int, seed: int) -> None:
        """Cut passes over `rows` into batches."""
        self._rows = rows
        self._batch_size = batch_size
        self._seed = seed

    @property
    def per_epoch(self) -> int:
        """Batches of a pass."""
        return ceil_div(len(self._rows), self._batch_size)

    def of_epoch(self, epoch: int) -> list[Batch[Row]]:
        """The batches of one pass."""
        order = epoch_order(len(self._rows), seed=self._seed, epoch=epoch).tolist()
        parts = [order[i : i + self._batch_size] for i in range(0, len(order), self._batch_size)]
        return [
            Batch(epoch=epoch, index=index, rows=tuple(self._rows[i] for i in part))
            for index, part in enumerate(parts)
        ]

    def run(self, epochs: int, *, skip: int = 0) -> Iterator[Batch[Row]]:
        """Batches of `epochs` passes, without the first `skip` of them all."""
        for epoch in range(skip // self.per_epoch, epochs):
            first = max(0, skip - epoch * self.per_epoch)
            yield from self.of_epoch(epoch)[first:]

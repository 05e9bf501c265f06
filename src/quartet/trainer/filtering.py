"""Which prompts a rollout is made of: so many in their order, or as many as it takes.

With dynamic filtering (DAPO, arXiv:2503.14476) groups that teach nothing are replaced by the next
prompts of the episode. Drawn is exactly what is missing, so no accepted group is ever left over,
and which prompts a step consumes does not depend on which answer came first: it is the shortest
row of prompts that holds enough accepted groups, or what is left of the episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quartet.algorithms import FilterVerdict, GroupFilter
from quartet.config import PpoConfig
from quartet.data.samples import Prompt, epoch_order
from quartet.trainer.experience import Group, Sample

FILTERED = "filtered"
"""Why the samples of a filtered group are not trained on, in ledger and metrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """Prompts that follow each other in one pass over the data."""

    episode: int
    """Number of the pass, from 0."""
    first: int
    """Number of the first of them in the pass, from 0."""
    prompts: tuple[Prompt, ...]


class PromptCursor:
    """Hands out the prompts of each pass in an order that the seed and the pass alone decide."""

    def __init__(
        self, prompts: Sequence[Prompt], *, seed: int, num_episodes: int, consumed: int = 0
    ) -> None:
        """Stand behind the first `consumed` prompts of all passes."""
        self._prompts = prompts
        self._seed = seed
        self._num_episodes = num_episodes
        self.consumed = consumed
        """Prompts handed out in all passes: with the seed, all that there is to remember."""

    @property
    def episode(self) -> int:
        """The pass that the next prompt belongs to."""
        return self.consumed // len(self._prompts)

    def draw(self, count: int, *, episode: int | None = None) -> Draw:
        """At most `count` prompts, all of the same pass.

        Args:
            count: how many are wanted.
            episode: only prompts of this pass; None starts the next one where one has ended.

        Returns:
            The draw; without prompts where nothing is left.
        """
        current, first = divmod(self.consumed, len(self._prompts))
        if current >= self._num_episodes or episode not in (None, current):
            return Draw(episode=current, first=first, prompts=())
        order = epoch_order(len(self._prompts), seed=self._seed, epoch=current)
        rows = order[first : first + count].tolist()
        self.consumed += len(rows)
        return Draw(episode=current, first=first, prompts=tuple(self._prompts[row] for row in rows))


def group_filter(config: PpoConfig) -> GroupFilter | None:
    """The filter that the flags ask for, if any."""
    algo = config.algo
    if not algo.dynamic_filtering_enable:
        return None
    low, high = algo.dynamic_filtering_range
    return GroupFilter(low=low, high=high, mean_only=algo.dynamic_filtering_mean_only)


def verdict_on(rule: GroupFilter, group: Group, kept: Sequence[Sample]) -> FilterVerdict:
    """Judge a group by the scores, not the rewards, of the samples that have one."""
    return rule.verdict([group.rewards[sample.sample_id].score for sample in kept])


def pass_rate(*, accepted: int, drawn: int) -> float:
    """Percentage of groups that were accepted, from 0 to 100."""
    return 100.0 * accepted / drawn if drawn else 0.0

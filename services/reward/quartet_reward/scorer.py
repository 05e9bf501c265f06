"""What a scorer is. To add one: a file under `scorers/`, and a line in `scorers/__init__.py`.

A scorer knows items and numbers. It does not know gRPC, request ids, or who else is asking: the
servicer and the batcher do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quartet.types import Failure, Reward, ScoreItem

Outcome = Reward | Failure


@dataclass(frozen=True, kw_only=True, slots=True)
class ScorerTraits:
    """What a started scorer says of itself, for GetInfo and for the batcher."""

    kind: str
    """Name in the registry: function, model, http."""
    digest: str = ""
    """SHA-256 of the code or the weights that score; empty when they are somewhere else."""
    model_name_or_path: str = ""
    tokenizer_fingerprint: str = ""
    max_sequence_length: int = 0
    """Tokens after which an input is cut on the right; 0 for no limit."""
    normalizes: bool = False
    """True when rewards are (x - mean) / std with the mean and std of the model's config."""
    max_batches: int = 1
    """Batches it can work on at once."""
    max_batch_items: int = 1
    """Most items of a batch."""
    max_batch_cost: int = 0
    """Most padded tokens of a batch (longest item times items); 0 for no limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One item, ready to be scored."""

    item: ScoreItem
    token_ids: tuple[int, ...] = ()
    """What a model reads, already cut to its length; empty for scorers that read text."""

    @property
    def cost(self) -> int:
        """Tokens, or 1 where tokens do not matter."""
        return max(1, len(self.token_ids))


class Scorer(Protocol):
    """Turns items into rewards."""

    async def start(self) -> ScorerTraits:
        """Load, and say what was loaded.

        Raises:
            ConfigError: the model, the file or the endpoint cannot score at all.
        """
        ...

    async def prepare(
        self, items: Sequence[ScoreItem], tokenizer_fingerprint: str
    ) -> list[Job | Failure]:
        """Make jobs of the items of one call, in their order.

        A job carries all that `score` needs, so jobs of different calls can share a batch.
        """
        ...

    async def score(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Score one batch; one outcome for each job, in order.

        Raises:
            DataError: the batch as a whole failed on its content. The batcher then tries its
                members one by one, so that only the guilty one fails.
            InfraError: the machinery failed, whatever the content.
        """
        ...

    async def sleep(self) -> None:
        """Free device memory. Nothing is in `score` when this is called."""
        ...

    async def wake(self) -> None:
        """Take the memory back."""
        ...

    async def stop(self) -> None:
        """Release everything. Called once, also after a failed start."""
        ...

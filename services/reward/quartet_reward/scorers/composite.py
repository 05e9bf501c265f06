"""A weighted sum of other scorers.

Each part keeps its own batcher, so a model still gets full batches and a function its single items
while all parts work at the same time. A sample has a reward only if every part gave one.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from quartet.types import Failure, ScoreItem
from quartet_reward.answer import read_answer
from quartet_reward.batcher import Batcher
from quartet_reward.scorer import Job, Outcome, Scorer, ScorerTraits

MAX_CONCURRENT_ITEMS = 4096
"""Items that are with the parts at once; more wait in the queue in front of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One term of the sum."""

    name: str
    weight: float
    scorer: Scorer


@dataclass(frozen=True, kw_only=True, slots=True)
class CompositeJob(Job):
    """One item with a job for each part, or the failure of a part to make one."""

    parts: tuple[Job | Failure, ...]


class CompositeScorer:
    """Adds up what its parts give. Their rewards are logged as `reward_<name>`."""

    def __init__(self, parts: Sequence[Part]) -> None:
        """Take parts that have not started yet; their names differ."""
        self._parts = tuple(parts)
        self._batchers: list[Batcher] = []

    async def start(self) -> ScorerTraits:
        """Start all parts.

        Raises:
            ConfigError: one of them cannot score at all.
        """
        traits = await asyncio.gather(*(part.scorer.start() for part in self._parts))
        self._batchers = [
            Batcher(
                part.scorer.score,
                max_batches=each.max_batches,
                max_items=each.max_batch_items,
                max_cost=each.max_batch_cost,
            )
            for part, each in zip(self._parts, traits, strict=True)
        ]
        fingerprints = {each.tokenizer_fingerprint for each in traits if each.tokenizer_fingerprint}
        lengths = [each.max_sequence_length for each in traits if each.max_sequence_length]
        models = [each for each in traits if each.kind == "model"]
        return ScorerTraits(
            kind="composite",
            digest=self._digest(traits),
            model_name_or_path=" + ".join(f"{p.weight:g} {p.name}" for p in self._parts),
            # Models with different tokenizers read text.
            tokenizer_fingerprint=fingerprints.pop() if len(fingerprints) == 1 else "",
            max_sequence_length=min(lengths, default=0),
            normalizes=bool(models) and all(each.normalizes for each in models),
            max_batches=MAX_CONCURRENT_ITEMS,
        )

    async def prepare(
        self, items: Sequence[ScoreItem], tokenizer_fingerprint: str
    ) -> list[Job | Failure]:
        """Let each part make its own job of each item."""
        columns = await asyncio.gather(
            *(part.scorer.prepare(items, tokenizer_fingerprint) for part in self._parts)
        )
        return [
            CompositeJob(item=item, parts=tuple(jobs))
            for item, jobs in zip(items, zip(*columns, strict=True), strict=True)
        ]

    async def score(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Score one item (batches are the parts' own) or several."""
        return list(await asyncio.gather(*(self._score_one(job) for job in jobs)))

    async def sleep(self) -> None:
        """Free the memory of all parts."""
        await asyncio.gather(*(part.scorer.sleep() for part in self._parts))

    async def wake(self) -> None:
        """Take it back."""
        await asyncio.gather(*(part.scorer.wake() for part in self._parts))

    async def stop(self) -> None:
        """Release all parts, also when one of them fails to let go."""
        results = await asyncio.gather(
            *(part.scorer.stop() for part in self._parts), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _score_one(self, job: Job) -> Outcome:
        assert isinstance(job, CompositeJob), "prepare makes no others"
        for part, prepared in zip(self._parts, job.parts, strict=True):
            if isinstance(prepared, Failure):
                return _of(part, prepared)
        ready = [prepared for prepared in job.parts if isinstance(prepared, Job)]
        answers = await asyncio.gather(
            *(
                batcher.submit([prepared])
                for batcher, prepared in zip(self._batchers, ready, strict=True)
            )
        )
        return self._sum([outcome for (outcome,) in answers])

    def _sum(self, outcomes: Sequence[Outcome]) -> Outcome:
        """The weighted sums of rewards and of scores, or the first failure."""
        reward = score = 0.0
        logs: dict[str, float] = {}
        parts: dict[str, float] = {}
        for part, outcome in zip(self._parts, outcomes, strict=True):
            if isinstance(outcome, Failure):
                return _of(part, outcome)
            reward += part.weight * outcome.reward
            score += part.weight * outcome.score
            logs |= outcome.extra_logs
            parts[f"reward_{part.name}"] = outcome.reward
        answer = {"rewards": [reward], "scores": [score], "extra_logs": logs | parts}
        return read_answer(answer, 1)[0]

    def _digest(self, traits: Sequence[ScorerTraits]) -> str:
        """Of weights and digests; empty when a part has none, for it may change unseen."""
        if not all(each.digest for each in traits):
            return ""
        text = "\n".join(
            f"{part.weight!r} {part.name} {each.digest}"
            for part, each in zip(self._parts, traits, strict=True)
        )
        return hashlib.sha256(text.encode()).hexdigest()


def _of(part: Part, failure: Failure) -> Failure:
    """A part's failure with its name."""
    return Failure(
        error_class=failure.error_class,
        reason=failure.reason,
        message=f"{part.name}: {failure.message}",
    )

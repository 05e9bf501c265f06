"""The reward room without its door: what Score, Sleep and Wake mean. Knows no gRPC."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from quartet import __version__
from quartet.errors import StateError, UnavailableError
from quartet.obs.metrics import FAILED_SAMPLES, QUEUE_DEPTH, SCORED_SAMPLES
from quartet.types import (
    Failure,
    RewardInfo,
    ScoreBatch,
    ScoreItem,
    ScoreRequest,
    ScoreResult,
    ServerInfo,
)
from quartet_reward.batcher import Batcher
from quartet_reward.scorer import Job, Outcome, Scorer, ScorerTraits


class RewardRoom:
    """One scorer behind one batcher."""

    def __init__(self, scorer: Scorer, *, replica: str, max_concurrent_calls: int = 0) -> None:
        """Take a scorer that has not started yet.

        Args:
            scorer: what scores.
            replica: name of this server among its replicas.
            max_concurrent_calls: for GetInfo.
        """
        self._scorer = scorer
        self._replica = replica
        self._max_concurrent_calls = max_concurrent_calls
        self._traits = ScorerTraits(kind="none")
        self._batcher: Batcher | None = None
        self._is_asleep = False

    async def start(self) -> None:
        """Load the scorer. Raises ConfigError when it cannot score."""
        traits = await self._scorer.start()
        self._traits = traits
        self._batcher = Batcher(
            self._scorer.score,
            max_batches=traits.max_batches,
            max_items=traits.max_batch_items,
            max_cost=traits.max_batch_cost,
        )
        QUEUE_DEPTH.labels(queue="reward").set_function(lambda: self._require_batcher().num_waiting)

    @property
    def is_serving(self) -> bool:
        """True between the end of `start` and a sleep."""
        return self._batcher is not None and not self._is_asleep

    async def stop(self) -> None:
        """Release the scorer."""
        await self._scorer.stop()

    def info(self) -> RewardInfo:
        """What this server is."""
        traits = self._traits
        info = ServerInfo(
            service="reward",
            server_version=__version__,
            replica=self._replica,
            digest=traits.digest,
            tokenizer_fingerprint=traits.tokenizer_fingerprint,
            capabilities=("sleep",),
            max_sequence_length=traits.max_sequence_length,
            max_concurrent_calls=self._max_concurrent_calls,
            model_name_or_path=traits.model_name_or_path,
        )
        return RewardInfo(info=info, scorers=(traits.kind,), normalizes=traits.normalizes)

    async def score(self, request: ScoreRequest) -> ScoreBatch:
        """Score the items of one call.

        Raises:
            StateError: the room is asleep.
            UnavailableError: the queue is full, or the machinery failed for every item: another
                replica may do better.
        """
        if self._is_asleep:
            raise StateError("the reward service is asleep", reason="ASLEEP", remedy="call Wake")
        outcomes = await self._outcomes(request)
        _count(outcomes)
        _refuse_if_all_infra(outcomes)
        return ScoreBatch(
            results=tuple(map(self._result, request.items, outcomes)),
            replica=self._replica,
            server_version=__version__,
            digest=self._traits.digest,
        )

    async def sleep(self) -> None:
        """Refuse calls, finish those under way, free device memory."""
        self._is_asleep = True
        await self._require_batcher().drain()
        await self._scorer.sleep()

    async def wake(self) -> None:
        """Take the memory back and accept calls."""
        await self._scorer.wake()
        self._is_asleep = False

    async def _outcomes(self, request: ScoreRequest) -> list[Outcome]:
        prepared = await self._scorer.prepare(request.items, request.tokenizer_fingerprint)
        jobs = [job for job in prepared if isinstance(job, Job)]
        scored = iter(await self._require_batcher().submit(jobs))
        return [next(scored) if isinstance(entry, Job) else entry for entry in prepared]

    def _result(self, item: ScoreItem, outcome: Outcome) -> ScoreResult:
        if isinstance(outcome, Failure):
            outcome = dataclasses.replace(outcome, replica=self._replica)
        return ScoreResult(sample_id=item.sample_id, outcome=outcome)

    def _require_batcher(self) -> Batcher:
        if self._batcher is None:
            raise UnavailableError("the reward service is still loading", reason="LOADING")
        return self._batcher


def _refuse_if_all_infra(outcomes: Sequence[Outcome]) -> None:
    """Fail the call when no item met a working scorer, so that it is retried elsewhere.

    A failed call is not remembered under its request_id, a result is.
    """
    failures = [o for o in outcomes if isinstance(o, Failure) and o.error_class == "INFRA"]
    if outcomes and len(failures) == len(outcomes):
        raise UnavailableError(failures[0].message, reason=failures[0].reason)


def _count(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        if isinstance(outcome, Failure):
            SCORED_SAMPLES.labels(outcome=outcome.error_class).inc()
            FAILED_SAMPLES.labels(reason=outcome.reason).inc()
        else:
            SCORED_SAMPLES.labels(outcome="reward").inc()

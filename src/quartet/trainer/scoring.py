"""The stage of the pipeline that asks for rewards."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

from quartet.errors import FatalError
from quartet.trainer.drops import reason_of
from quartet.trainer.experience import Group, Sample
from quartet.trainer.rooms import Judge
from quartet.types import Failure, Reward, ScoreBatch, ScoreItem, ScoreRequest

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens kept."""

CALL_SAMPLES = 256
"""Most samples of one Score call."""


class Scoring:
    """Has completions scored. A failure is a drop with a reason, never a number."""

    def __init__(
        self,
        judge: Judge | None,
        decode: Decode,
        *,
        run_id: str,
        tokenizer_fingerprint: str = "",
        with_token_ids: bool = False,
        max_samples: int = 0,
    ) -> None:
        """Score by `judge`.

        Args:
            judge: The reward replicas; None where all samples bring their rewards.
            decode: Token ids to text.
            run_id: Begins the request ids.
            tokenizer_fingerprint: Of the policy's tokenizer.
            with_token_ids: Send the tokens too, for scorers that share the tokenizer.
            max_samples: Most samples that a call may carry; 0 for no limit of the service's own.
        """
        self._judge = judge
        self._decode = decode
        self._run_id = run_id
        self._fingerprint = tokenizer_fingerprint if with_token_ids else ""
        self._with_token_ids = with_token_ids
        self.max_samples = min(max_samples or CALL_SAMPLES, CALL_SAMPLES)

    async def run(self, groups: Sequence[Group]) -> list[dict[str, Failure]]:
        """Score the samples of `groups` that bring no reward, and fill in their rewards.

        Returns:
            For each group, the failures by sample id.
        """
        samples = [s for g in groups for s in g.samples if s.sample_id not in g.rewards]
        outcomes: dict[str, Reward | Failure] = {}
        for start in range(0, len(samples), self.max_samples):
            part = samples[start : start + self.max_samples]
            outcomes |= _outcomes(part, await self._score(self._request(part)))
        failures: list[dict[str, Failure]] = []
        for group in groups:
            failed: dict[str, Failure] = {}
            for sample in group.samples:
                outcome = outcomes.get(sample.sample_id)
                if isinstance(outcome, Failure):
                    failed[sample.sample_id] = outcome
                elif outcome is not None:
                    group.rewards[sample.sample_id] = outcome
            failures.append(failed)
        return failures

    async def _score(self, request: ScoreRequest) -> ScoreBatch:
        if self._judge is None:
            raise FatalError("nobody judges the samples", reason="NO_JUDGE")
        return await self._judge.score(request)

    def text_of(self, sample: Sample) -> str:
        """The completion as text, special tokens kept."""
        return self._decode(sample.token_ids[sample.prompt_length :].tolist())

    def _request(self, samples: Sequence[Sample]) -> ScoreRequest:
        # The id says what is scored: the same samples are the same request, also after a restart.
        names = hashlib.sha256("|".join(s.sample_id for s in samples).encode()).hexdigest()
        return ScoreRequest(
            request_id=f"{self._run_id}/score/{names[:32]}",
            items=tuple(self._item(s) for s in samples),
            tokenizer_fingerprint=self._fingerprint,
        )

    def _item(self, sample: Sample) -> ScoreItem:
        tokens = sample.token_ids.tolist()
        return ScoreItem(
            sample_id=sample.sample_id,
            prompt=sample.prompt.text,
            query=self._decode(tokens),
            label=sample.prompt.label,
            token_ids=tuple(tokens) if self._with_token_ids else (),
            prompt_length=sample.prompt_length if self._with_token_ids else 0,
            truncated=sample.truncated,
        )


def failure_reason(failure: Failure) -> str:
    """Name for `dropped/<reason>`."""
    return reason_of("reward", failure)


def _outcomes(samples: Sequence[Sample], batch: ScoreBatch) -> dict[str, Reward | Failure]:
    """Outcomes by sample id, with what must never be trained on turned into failures."""
    outcomes: dict[str, Reward | Failure] = {}
    for sample, result in zip(samples, batch.results, strict=True):
        if result.sample_id != sample.sample_id:
            raise FatalError(
                f"reward {batch.replica} answered for {result.sample_id} where "
                f"{sample.sample_id} was asked",
                reason="REWARD_OUT_OF_ORDER",
                replica=batch.replica,
            )
        outcome = result.outcome
        if isinstance(outcome, Failure):
            if outcome.error_class == FatalError.error_class:
                raise FatalError(outcome.message, reason=outcome.reason, sample_id=sample.sample_id)
        elif not (math.isfinite(outcome.reward) and math.isfinite(outcome.score)):
            outcome = Failure(
                error_class="DATA",
                reason="NOT_FINITE",
                message=f"reward {outcome.reward}, score {outcome.score}",
                replica=batch.replica,
            )
        outcomes[sample.sample_id] = outcome
    return outcomes

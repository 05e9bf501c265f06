"""The first stage of the pipeline: prompts become groups of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quartet.data.samples import Prompt
from quartet.errors import DataError, FatalError
from quartet.trainer.drops import Drops, reason_of
from quartet.trainer.experience import Group, Sample
from quartet.trainer.ledger import DroppedSample, GeneratedSample, IssuedSample, Ledger
from quartet.trainer.rooms import Sampler
from quartet.trainer.seeds import sample_id, sample_seed
from quartet.types import (
    Completion,
    Failure,
    FinishReason,
    GenerateRequest,
    LogprobKind,
    LogprobSpec,
    PromptGroup,
    SamplingParams,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationSettings:
    """How prompts are completed."""

    run_id: str
    seed: int
    sampling: SamplingParams
    num_samples: int
    """Samples of a prompt."""
    isolated: bool = False
    """Have each call run as a batch of its own."""

    @property
    def logprob_spec(self) -> LogprobSpec:
        """The distribution that the engine's log-probabilities must be of."""
        return LogprobSpec(
            kind=LogprobKind.PROCESSED,
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            top_k=self.sampling.top_k,
        )


class Generation:
    """Completes prompts, and keeps what can be used."""

    def __init__(
        self, settings: GenerationSettings, sampler: Sampler, *, ledger: Ledger, drops: Drops
    ) -> None:
        """Complete prompts by `sampler`."""
        self.settings = settings
        self._sampler = sampler
        self._ledger = ledger
        self._drops = drops

    def request_of(self, prompt: Prompt, *, episode: int) -> PromptGroup:
        """A prompt and its samples' names and seeds."""
        indices = range(self.settings.num_samples)
        return PromptGroup(
            group_id=f"{episode}/{prompt.prompt_id}",
            prompt_token_ids=prompt.token_ids,
            num_samples=self.settings.num_samples,
            sample_ids=tuple(
                sample_id(episode=episode, prompt_id=prompt.prompt_id, index=i) for i in indices
            ),
            seeds=tuple(
                sample_seed(
                    run_seed=self.settings.seed,
                    episode=episode,
                    prompt_id=prompt.prompt_id,
                    index=i,
                )
                for i in indices
            ),
        )

    async def issue(self, step: int, requests: Sequence[PromptGroup]) -> None:
        """Record the samples that are about to be made."""
        await self._ledger.issue(
            step,
            [
                IssuedSample(sample_id=name, group_id=r.group_id, seed=seed)
                for r in requests
                for name, seed in zip(r.sample_ids, r.seeds, strict=True)
            ],
        )

    async def run(
        self, groups: Sequence[Group], requests: Sequence[PromptGroup], *, policy_version: int
    ) -> None:
        """Complete the prompts of `groups` in one call and fill in their samples."""
        request = GenerateRequest(
            request_id=f"{self.settings.run_id}/generate/{requests[0].group_id}",
            groups=tuple(requests),
            sampling=self.settings.sampling,
            logprob_kind=LogprobKind.PROCESSED,
            min_policy_version=policy_version,
            isolated=self.settings.isolated,
        )
        try:
            result = await self._sampler.generate(request)
        except DataError as error:
            await self._lose_call(requests, error)
            return
        self._check_spec(result.logprob_spec, result.replica)
        kept: list[Sample] = []
        lost: list[DroppedSample] = []
        for group, asked, answer in zip(groups, requests, result.groups, strict=True):
            for name, completion in zip(asked.sample_ids, answer.completions, strict=True):
                problem = unusable(completion)
                if problem is None:
                    group.samples.append(sample_of(name, group, completion, result.replica))
                else:
                    reason, message = problem
                    lost.append(DroppedSample(sample_id=name, reason=reason, message=message))
            kept.extend(group.samples)
        await self._record(kept, lost)

    async def _lose_call(self, requests: Sequence[PromptGroup], error: DataError) -> None:
        """Drop all samples of a call that the engine refused for its data."""
        failure = Failure(
            error_class=error.error_class, reason=error.info.reason, message=str(error)
        )
        lost = [
            DroppedSample(
                sample_id=name, reason=reason_of("rollout", failure), message=failure.message
            )
            for r in requests
            for name in r.sample_ids
        ]
        await self._record([], lost)

    async def _record(self, kept: Sequence[Sample], lost: Sequence[DroppedSample]) -> None:
        await self._ledger.generated(
            [
                GeneratedSample(
                    sample_id=s.sample_id,
                    replica=s.replica,
                    first_policy_version=s.first_policy_version,
                    last_policy_version=s.last_policy_version,
                    num_tokens=len(s.token_ids),
                )
                for s in kept
            ]
        )
        await self._ledger.dropped(lost)
        for drop in lost:
            self._drops.drop(drop.reason, drop.message)

    def _check_spec(self, found: LogprobSpec, replica: str) -> None:
        """A wrong behaviour distribution would bias every ratio, so it ends the run."""
        if found != self.settings.logprob_spec:
            raise FatalError(
                f"rollout {replica} gave log-probabilities of {found}, "
                f"asked were {self.settings.logprob_spec}",
                reason="LOGPROB_SPEC_MISMATCH",
                replica=replica,
            )


def unusable(completion: Completion) -> tuple[str, str] | None:
    """(reason, message) when a completion is none.

    Raises:
        FatalError: the engine says that going on makes no sense.
    """
    failure = completion.failure
    if failure is not None:
        if failure.error_class == FatalError.error_class:
            raise FatalError(failure.message, reason=failure.reason, replica=failure.replica)
        return reason_of("rollout", failure), failure.message
    if completion.finish_reason is FinishReason.ABORTED:
        return "rollout_aborted", "the engine gave the completion up"
    if len(completion.token_ids) == 0:
        return "rollout_empty", "the completion has no token"
    return None


def sample_of(name: str, group: Group, completion: Completion, replica: str) -> Sample:
    """The sample that a completion of a group's prompt makes.

    Raises:
        FatalError: its log-probabilities are not finite.
    """
    prompt = np.asarray(group.prompt.token_ids, np.int32)
    if not np.isfinite(completion.logprobs).all():
        raise FatalError(
            "the rollout engine gave log-probabilities that are not finite",
            reason="ROLLOUT_NOT_FINITE",
            sample_id=name,
            replica=replica,
        )
    return Sample(
        sample_id=name,
        group=group.index,
        prompt=group.prompt,
        token_ids=np.concatenate([prompt, completion.token_ids]).astype(np.int32),
        rollout_logprobs=np.concatenate(
            [np.zeros(len(prompt), np.float32), completion.logprobs]
        ).astype(np.float32),
        finish_reason=completion.finish_reason,
        first_policy_version=completion.versions[0].policy_version,
        last_policy_version=completion.versions[-1].policy_version,
        replica=replica,
        versions=completion.versions,
    )

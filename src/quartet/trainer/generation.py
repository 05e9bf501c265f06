"""The first stage of the pipeline: prompts become groups of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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
    GenerateResult,
    LogprobKind,
    LogprobSpec,
    PromptGroup,
    Reward,
    SamplingParams,
)

GENERATE_TOKENS = 2048
"""Tokens that make a Generate call, and those that follow from its answer, worth their price.

Each costs about 2 ms of CPU, and a token costs even a tiny model more than 0.2 ms in all services
together."""


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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Made:
    """A sample, and its reward where whoever made it also judges it."""

    sample: Sample
    reward: Reward | None = None


class Producer(Protocol):
    """Makes the samples of prompts: single answers, or an agent's episodes."""

    def groups_per_call(self, settings: GenerationSettings) -> int:
        """Prompts that are best made together."""
        ...

    async def make(
        self,
        groups: Sequence[Group],
        requests: Sequence[PromptGroup],
        *,
        settings: GenerationSettings,
        policy_version: int,
    ) -> list[list[Made | DroppedSample]]:
        """Make the samples that `requests` name for the prompts of `groups`.

        Raises:
            DataError: none of them can be made.
            InfraError: the policy cannot be asked.
            FatalError: going on makes no sense.
        """
        ...


class Answers:
    """Single answers: what the policy says to a prompt, as it is. A reward is still to come."""

    def __init__(self, sampler: Sampler) -> None:
        """Complete prompts by `sampler`."""
        self._sampler = sampler

    def groups_per_call(self, settings: GenerationSettings) -> int:
        """How many groups share a Generate call, which is answered when all of them are done.

        That delays nothing worth having where completions are short. Where they can be long, each
        group has a call of its own.
        """
        longest = settings.sampling.max_new_tokens
        if longest is None:
            return 1
        return max(1, GENERATE_TOKENS // (settings.num_samples * longest))

    async def make(
        self,
        groups: Sequence[Group],
        requests: Sequence[PromptGroup],
        *,
        settings: GenerationSettings,
        policy_version: int,
    ) -> list[list[Made | DroppedSample]]:
        """Complete the prompts in one call."""
        result = await self._sampler.generate(
            GenerateRequest(
                request_id=f"{settings.run_id}/generate/{requests[0].group_id}",
                groups=tuple(requests),
                sampling=settings.sampling,
                logprob_kind=LogprobKind.PROCESSED,
                min_policy_version=policy_version,
                isolated=settings.isolated,
            )
        )
        check_spec(settings, result)
        found: list[list[Made | DroppedSample]] = []
        for group, asked, answer in zip(groups, requests, result.groups, strict=True):
            made: list[Made | DroppedSample] = []
            for name, completion in zip(asked.sample_ids, answer.completions, strict=True):
                problem = unusable(completion)
                if problem is None:
                    made.append(Made(sample=sample_of(name, group, completion, result.replica)))
                else:
                    reason, message = problem
                    made.append(DroppedSample(sample_id=name, reason=reason, message=message))
            found.append(made)
        return found


class Generation:
    """Has samples made, and keeps what can be used."""

    def __init__(
        self, settings: GenerationSettings, producer: Producer, *, ledger: Ledger, drops: Drops
    ) -> None:
        """Have samples made by `producer`."""
        self.settings = settings
        self._producer = producer
        self._ledger = ledger
        self._drops = drops

    @property
    def groups_per_call(self) -> int:
        """Prompts that are best made together."""
        return self._producer.groups_per_call(self.settings)

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
        """Have the samples of `groups` made, and fill them in with the rewards that they bring."""
        try:
            outcomes = await self._producer.make(
                groups, requests, settings=self.settings, policy_version=policy_version
            )
        except DataError as error:
            await self._lose_call(requests, error)
            return
        lost: list[DroppedSample] = []
        for group, made in zip(groups, outcomes, strict=True):
            lost += take(group, made)
        await self._record([s for group in groups for s in group.samples], lost)

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


def take(group: Group, made: Sequence[Made | DroppedSample]) -> list[DroppedSample]:
    """Put into a group what was made for it; returns what was not."""
    for entry in made:
        if isinstance(entry, Made):
            group.samples.append(entry.sample)
            if entry.reward is not None:
                group.rewards[entry.sample.sample_id] = entry.reward
    return [entry for entry in made if isinstance(entry, DroppedSample)]


def check_spec(settings: GenerationSettings, result: GenerateResult) -> None:
    """A wrong behaviour distribution would bias every ratio, so it ends the run.

    Raises:
        FatalError: log-probabilities are of another one than was asked for.
    """
    if result.logprob_spec != settings.logprob_spec:
        raise FatalError(
            f"rollout {result.replica} gave log-probabilities of {result.logprob_spec}, "
            f"asked were {settings.logprob_spec}",
            reason="LOGPROB_SPEC_MISMATCH",
            replica=result.replica,
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


def check_finite(completion: Completion, name: str, replica: str) -> None:
    """Numbers that are none would end in every ratio.

    Raises:
        FatalError: the completion's log-probabilities are not finite.
    """
    if not np.isfinite(completion.logprobs).all():
        raise FatalError(
            "the rollout engine gave log-probabilities that are not finite",
            reason="ROLLOUT_NOT_FINITE",
            sample_id=name,
            replica=replica,
        )


def sample_of(name: str, group: Group, completion: Completion, replica: str) -> Sample:
    """The sample that a completion of a group's prompt makes.

    Raises:
        FatalError: its log-probabilities are not finite.
    """
    prompt = np.asarray(group.prompt.token_ids, np.int32)
    check_finite(completion, name, replica)
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

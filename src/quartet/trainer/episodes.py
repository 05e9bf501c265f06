"""Samples that an agent makes: the trainer's side of its questions to the policy.

The agent runs in workers (`quartet.agents`); each of its turns is one Generate call from here, with
a request id and a seed that follow from sample and turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from quartet.agents.episode import Episode, Play, Script, Turn, token_ids
from quartet.agents.pool import AgentPool
from quartet.agents.process import Answer
from quartet.errors import DataError
from quartet.trainer.drops import reason_of
from quartet.trainer.experience import Group, Sample
from quartet.trainer.generation import GenerationSettings, Made, check_finite, check_spec, unusable
from quartet.trainer.ledger import DroppedSample
from quartet.trainer.rooms import Sampler
from quartet.trainer.seeds import turn_seed
from quartet.types import (
    Completion,
    Failure,
    GenerateRequest,
    GenerateResult,
    LogprobKind,
    PromptGroup,
    SamplingParams,
    VersionSpan,
)

logger = logging.getLogger(__name__)


class Episodes:
    """`Producer` by an agent: samples with rewards."""

    def __init__(
        self,
        agents: AgentPool,
        sampler: Sampler,
        *,
        max_length: int,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Have episodes played in `agents`, whose policy is `sampler`.

        Args:
            agents: the workers.
            sampler: the rollout replicas.
            max_length: most tokens of a sample.
            say: shows a line to the user: the first failure of each kind.
        """
        self._agents = agents
        self._say = say
        self._said: set[str] = set()
        self._sampler = sampler
        self._max_length = max_length

    def groups_per_call(self, settings: GenerationSettings) -> int:
        """Episodes share no calls, so there is nothing to wait for each other."""
        return 1

    async def make(
        self,
        groups: Sequence[Group],
        requests: Sequence[PromptGroup],
        *,
        settings: GenerationSettings,
        policy_version: int,
    ) -> list[list[Made | DroppedSample]]:
        """Play an episode for each sample, all at the same time."""
        tasks = [
            asyncio.create_task(self._play(group, name, seed, settings, policy_version))
            for group, asked in zip(groups, requests, strict=True)
            for name, seed in zip(asked.sample_ids, asked.seeds, strict=True)
        ]
        try:
            outcomes = iter(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        return [[next(outcomes) for _ in asked.sample_ids] for asked in requests]

    async def _play(
        self,
        group: Group,
        name: str,
        seed: int,
        settings: GenerationSettings,
        policy_version: int,
    ) -> Made | DroppedSample:
        """Have one sample made; what fails in it is a drop with a reason."""
        episode = Episode(
            sample_id=name,
            prompt=group.prompt.text,
            label=group.prompt.label,
            sampling=settings.sampling,
            max_length=self._max_length,
        )
        policy = _Policy(
            self._sampler, episode, seed, settings, policy_version, self._agents.settings.vocab_size
        )
        try:
            play = await self._agents.play(episode, policy.script, policy.attempt)
        except DataError as error:
            return self._lost(name, error)
        return Made(sample=_sample_of(name, group, play, policy.script), reward=play.reward)

    def _lost(self, name: str, error: DataError) -> DroppedSample:
        """The drop that a failed episode is, with a trace of it in the log."""
        failure = Failure(
            error_class=error.error_class, reason=error.info.reason, message=error.message
        )
        drop = DroppedSample(
            sample_id=name, reason=reason_of("agent", failure), message=error.message
        )
        logger.warning("%s [sample %s]", error.message, name)
        for note in getattr(error, "__notes__", ()):
            logger.debug("[sample %s]\n%s", name, note)
        if drop.reason not in self._said:
            self._said.add(drop.reason)
            self._say(f"{drop.reason}, here for the first time: {error} [sample {name}]")
        return drop


class _Policy:
    """Completes the prompts of one episode, and writes down what was said."""

    def __init__(
        self,
        sampler: Sampler,
        episode: Episode,
        seed: int,
        settings: GenerationSettings,
        policy_version: int,
        vocab_size: int,
    ) -> None:
        self.script = Script()
        self._sampler = sampler
        self._episode = episode
        self._seed = seed
        self._settings = settings
        self._policy_version = policy_version
        self._vocab_size = vocab_size

    def attempt(self, number: int) -> Answer:
        """The function that answers in the episode's attempt `number`."""

        async def answer(turn: int, wanted: dict[str, Any]) -> dict[str, Any]:
            return await self._answer(f"{self._episode.sample_id}/{number}/{turn}", turn, wanted)

        return answer

    async def _answer(self, name: str, turn: int, wanted: dict[str, Any]) -> dict[str, Any]:
        prompt = tuple(
            token_ids(
                wanted["prompt_token_ids"],
                "prompt_token_ids",
                limit=self.script.limit(self._vocab_size),
            )
        )
        request = GenerateRequest(
            request_id=f"{self._settings.run_id}/agent/{name}",
            groups=(
                PromptGroup(
                    group_id=name,
                    prompt_token_ids=prompt,
                    sample_ids=(name,),
                    seeds=(turn_seed(self._seed, turn),),
                ),
            ),
            sampling=self._sampling(len(prompt), wanted),
            logprob_kind=LogprobKind.PROCESSED,
            min_policy_version=self._policy_version,
            isolated=self._settings.isolated,
        )
        result = await self._sampler.generate(request)
        check_spec(self._settings, result)
        completion = _completion_of(result)
        self.script.turns.append(
            Turn(prompt_token_ids=prompt, completion=completion, replica=result.replica)
        )
        return {
            "request_id": request.request_id,
            "token_ids": completion.token_ids.tolist(),
            "logprobs": completion.logprobs.tolist(),
            "finish_reason": str(completion.finish_reason),
        }

    def _sampling(self, prompt_length: int, wanted: dict[str, Any]) -> SamplingParams:
        """The run's sampling with the lengths and stops that are asked for, as far as allowed."""
        sampling, most = self._settings.sampling, self._episode.max_length
        if prompt_length >= most:
            raise DataError(
                f"a prompt of {prompt_length} tokens leaves no room in samples of {most} tokens",
                reason="NO_ROOM",
            )
        limits = [most - prompt_length, sampling.max_new_tokens, wanted["max_tokens"]]
        longest = max(1, min(limit for limit in limits if limit is not None))
        return replace(
            sampling,
            max_new_tokens=longest,
            min_new_tokens=max(1, min(wanted["min_tokens"], longest)),
            stop_token_ids=tuple(wanted["stop_token_ids"]),
            ignore_eos=wanted["ignore_eos"],
        )


def _completion_of(result: GenerateResult) -> Completion:
    """The one completion of a call.

    Raises:
        DataError: there is none.
        FatalError: its log-probabilities are not finite, or the engine gave up for good.
    """
    [completion] = result.groups[0].completions
    if (problem := unusable(completion)) is not None:
        reason, message = problem
        raise DataError(message, reason=reason.upper())
    check_finite(completion, completion.sample_id, result.replica)
    return completion


def _sample_of(name: str, group: Group, play: Play, script: Script) -> Sample:
    """The sample that a play makes."""
    spans = _spans(play)
    first = spans[0][0]
    versions = tuple(
        VersionSpan(
            policy_version=span.policy_version,
            start=len(turn.prompt_token_ids) + span.start - first,
            end=len(turn.prompt_token_ids) + span.end - first,
        )
        for turn in script.turns
        for span in turn.completion.versions
    )
    oldest, newest = script.versions
    return Sample(
        sample_id=name,
        group=group.index,
        prompt=group.prompt,
        token_ids=play.token_ids,
        rollout_logprobs=play.rollout_logprobs,
        finish_reason=play.finish_reason,
        first_policy_version=oldest,
        last_policy_version=newest,
        replica=script.turns[-1].replica,
        versions=versions,
        action_spans=spans,
    )


def _spans(play: Play) -> tuple[tuple[int, int], ...]:
    """[start, end) of the runs of actions."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], play.action_mask, [0]])))
    return tuple((int(start), int(end)) for start, end in edges.reshape(-1, 2))

"""From prompts to experience: generate, score, and evaluate under up to three models.

Normally each group of samples goes on to reward, reference, policy and critic as soon as it comes
back from the rollout engine, and the services work at the same time. What waits for a busy service
is sent together as its next call (`lane`). Groups with so few tokens to sample that a call would
cost more than they do are generated together.

In a deterministic run the phases are barriers, and every call carries the same samples in the same
order each time, so that no number depends on which answer came first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass

from quartet.algorithms import FilterVerdict, GroupFilter
from quartet.data.samples import Prompt
from quartet.obs.progress import Phase, Progress
from quartet.trainer.drops import Drops
from quartet.trainer.evaluators import Evaluators
from quartet.trainer.experience import Experience, Group, Sample, assemble
from quartet.trainer.filtering import FILTERED, pass_rate, verdict_on
from quartet.trainer.generation import Generation
from quartet.trainer.lane import Lane
from quartet.trainer.ledger import DroppedSample, Ledger
from quartet.trainer.rest import Rest
from quartet.trainer.scoring import Scoring, failure_reason
from quartet.types import Failure, PromptGroup

ISOLATED_SAMPLES = 64
"""Samples of one Generate call in a deterministic run."""

CALL_TOKENS = 1 << 17
"""Most tokens of one streamed call to a learner or a reference model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSettings:
    """What decides how a rollout is made."""

    temperature: float
    """Divisor of the logits, in sampling and in every evaluation."""
    min_group: int = 1
    """Groups with fewer valid samples are dropped: 2 for estimators that compare."""
    group_filter: GroupFilter | None = None
    """Which groups are worth training on; those that are not are replaced. None takes all."""
    deterministic: bool = False
    max_groups_in_flight: int = 64
    """Prompt groups that generate at once."""
    learners_last: bool = False
    """Leave to `finish` what the learners evaluate: while groups are made, they train or rest."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rollout:
    """An experience and what is known of its making."""

    experience: Experience
    dropped: dict[str, int]
    """Samples dropped in this step by reason."""
    generation_seconds: float
    seconds: float
    """The whole time, generation included."""
    pass_rate: float | None = None
    """Percentage of groups that were accepted; None without a filter."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Step:
    """One rollout in the making."""

    number: int
    policy_version: int
    groups: list[Group]
    requests: list[PromptGroup]
    generate: Phase
    score: Phase
    evaluate: Phase


class Pipeline:
    """Makes the experience of one step after the other."""

    def __init__(
        self,
        settings: PipelineSettings,
        *,
        generation: Generation,
        scoring: Scoring,
        evaluators: Evaluators,
        ledger: Ledger,
        progress: Progress,
        drops: Drops,
        rest: Rest,
    ) -> None:
        """Join the stages. Where `rest` has somebody sleep, they are phases."""
        self._settings = settings
        self._rest = rest
        self._generation = generation
        self._scoring = scoring
        self._evaluators = evaluators
        late = evaluators.of_learners(temperature=settings.temperature)
        self._late = late if settings.learners_last else []
        frozen = evaluators.of_frozen(temperature=settings.temperature)
        self._passes = frozen if settings.learners_last else frozen + late
        self._ledger = ledger
        self._progress = progress
        self._drops = drops

    async def make(
        self,
        number: int,
        prompts: Sequence[Prompt],
        *,
        episode: int,
        policy_version: int,
        more: Callable[[int], Sequence[Prompt]] = lambda _: (),
    ) -> Rollout:
        """Turn prompts into the experience of step `number`.

        Args:
            number: The step.
            prompts: What to begin with; with a filter, as many groups are wanted.
            episode: The pass over the data that they belong to.
            policy_version: The weights to sample from, or newer.
            more: With a filter, gives at most so many of the prompts that follow.

        Raises:
            FatalError: too much was dropped, or a service gave numbers that are not finite.
            InfraError: a service is gone for good.
        """
        began, generation_seconds = time.monotonic(), 0.0
        before = self._drops.totals()
        groups: list[Group] = []
        wanted, accepted = len(prompts), 0
        while prompts:
            made, seconds = await self.gather(
                number, prompts, first=len(groups), episode=episode, policy_version=policy_version
            )
            generation_seconds += seconds
            groups += made
            accepted = sum(1 for group in groups if group.samples)
            filtering = self._settings.group_filter is not None
            prompts = more(wanted - accepted) if filtering and accepted < wanted else ()
        experience = await self.finish(groups)
        dropped = {k: v - before.get(k, 0) for k, v in self._drops.totals().items()}
        return Rollout(
            experience=experience,
            dropped={k: v for k, v in dropped.items() if v},
            generation_seconds=generation_seconds,
            seconds=time.monotonic() - began,
            pass_rate=(
                None
                if self._settings.group_filter is None
                else pass_rate(accepted=accepted, drawn=len(groups))
            ),
        )

    async def gather(
        self,
        number: int,
        prompts: Sequence[Prompt],
        *,
        first: int,
        episode: int,
        policy_version: int,
    ) -> tuple[list[Group], float]:
        """Take prompts through all stages but what is left to `finish`.

        Returns:
            Their groups, numbered from `first`, without the samples that were dropped; and the
            seconds of generation.
        """
        step = await self._round(number, prompts, first, episode, policy_version)
        return step.groups, step.generate.seconds

    async def finish(self, groups: Sequence[Group]) -> Experience:
        """Have the learners evaluate what was left to them, and lay all samples end to end."""
        alive = [group for group in groups if group.samples]
        if alive:
            await self._rest.learn()
            async with asyncio.TaskGroup() as tasks:
                for evaluation in self._late:
                    tasks.create_task(evaluation.run(alive))
        return assemble(
            groups,
            logprob_spec=self._generation.settings.logprob_spec,
            with_ref=self._evaluators.reference is not None,
            with_values=self._evaluators.critic is not None,
        )

    async def _round(
        self, number: int, prompts: Sequence[Prompt], first: int, episode: int, policy_version: int
    ) -> _Step:
        """Take prompts through all stages; their groups are numbered from `first`."""
        requests = [self._generation.request_of(p, episode=episode) for p in prompts]
        await self._generation.issue(number, requests)
        again = "more " if first else ""
        with ExitStack() as stack:
            generate, score, evaluate = (
                stack.enter_context(
                    self._progress.phase(
                        f"step {number} {again}{name}",
                        total=len(prompts) * self._generation.settings.num_samples,
                        unit="samples",
                    )
                )
                for name in ("generate", "score", "evaluate")
            )
            step = _Step(
                number=number,
                policy_version=policy_version,
                groups=[Group(index=first + i, prompt=prompt) for i, prompt in enumerate(prompts)],
                requests=requests,
                generate=generate,
                score=score,
                evaluate=evaluate,
            )
            phases = self._settings.deterministic or self._rest.is_on
            await (self._barriers(step) if phases else self._stream(step))
        return step

    async def _generate_all(self, step: _Step) -> None:
        """Generate as one phase; calls of a fixed composition are made one after the other."""
        size, width = max(1, ISOLATED_SAMPLES // self._generation.settings.num_samples), 1
        if not self._settings.deterministic:
            size = min(self._generation.groups_per_call, self._settings.max_groups_in_flight)
            width = self._settings.max_groups_in_flight // size
        slots = asyncio.Semaphore(width)

        async def generate(part: slice) -> None:
            async with slots:
                await self._generate(step, step.groups[part], step.requests[part])

        async with asyncio.TaskGroup() as tasks:
            for start in range(0, len(step.groups), size):
                tasks.create_task(generate(slice(start, start + size)))

    async def _barriers(self, step: _Step) -> None:
        """One phase after the other, with calls of a fixed composition."""
        await self._rest.generate()
        await self._generate_all(step)
        if self._settings.group_filter is not None:
            # Other prompts may have to take the places of some, before the next push.
            self._rest.push_follows = False
        await self._rest.judge()
        alive = [group for group in step.groups if group.samples]
        if self._settings.group_filter is not None:
            # What is filtered need not be evaluated.
            for group, failed in zip(alive, await self._scoring.run(alive), strict=True):
                await self._settle(step, group, failed)
            if alive := [group for group in alive if group.samples]:
                async with asyncio.TaskGroup() as tasks:
                    for evaluation in self._passes:
                        tasks.create_task(evaluation.run(alive))
            return
        # Different services: they may work at the same time, each has its one fixed call.
        async with asyncio.TaskGroup() as tasks:
            failures = tasks.create_task(self._scoring.run(alive))
            for evaluation in self._passes:
                tasks.create_task(evaluation.run(alive))
        for group, failed in zip(alive, failures.result(), strict=True):
            await self._settle(step, group, failed)

    async def _stream(self, step: _Step) -> None:
        """Each group goes through on its own; busy services get what waits as one call."""
        most = self._settings.max_groups_in_flight
        size = min(self._generation.groups_per_call, most)
        slots = asyncio.Semaphore(most // size)
        async with AsyncExitStack() as stack:
            score = await stack.enter_async_context(
                Lane(
                    self._scoring.run,
                    width=4,
                    weight=_num_samples,
                    max_weight=self._scoring.max_samples,
                )
            )
            evaluations = [
                await stack.enter_async_context(
                    Lane(e.run, width=e.width, weight=_num_tokens, max_weight=CALL_TOKENS)
                )
                for e in self._passes
            ]
            async with asyncio.TaskGroup() as tasks:
                for start in range(0, len(step.groups), size):
                    part = slice(start, start + size)
                    tasks.create_task(self._part(step, part, slots, score, evaluations))

    async def _part(
        self,
        step: _Step,
        part: slice,
        slots: asyncio.Semaphore,
        score: Lane[Group, dict[str, Failure]],
        evaluations: Sequence[Lane[Group, None]],
    ) -> None:
        """Take the groups of one Generate call through all stages."""
        groups = step.groups[part]
        async with slots:
            await self._generate(step, groups, step.requests[part])
        async with asyncio.TaskGroup() as tasks:
            for group in groups:
                if group.samples:
                    tasks.create_task(self._judge(step, group, score, evaluations))

    async def _judge(
        self,
        step: _Step,
        group: Group,
        score: Lane[Group, dict[str, Failure]],
        evaluations: Sequence[Lane[Group, None]],
    ) -> None:
        """Score and evaluate one group."""
        if self._settings.group_filter is not None:
            await self._settle(step, group, await score.submit(group))
            if group.samples:
                async with asyncio.TaskGroup() as tasks:
                    for lane in evaluations:
                        tasks.create_task(lane.submit(group))
            return
        async with asyncio.TaskGroup() as tasks:
            failures = tasks.create_task(score.submit(group))
            for lane in evaluations:
                tasks.create_task(lane.submit(group))
        await self._settle(step, group, failures.result())

    async def _generate(
        self, step: _Step, groups: Sequence[Group], requests: Sequence[PromptGroup]
    ) -> None:
        asked = sum(r.num_samples for r in requests)
        await self._generation.run(groups, requests, policy_version=step.policy_version)
        kept = sum(len(g.samples) for g in groups)
        step.generate.advance(asked)
        step.score.skip(asked - kept)
        step.evaluate.skip(asked - kept)

    async def _settle(self, step: _Step, group: Group, failures: dict[str, Failure]) -> None:
        """Keep the samples that are whole, drop the others, and record both."""
        asked = len(group.samples)
        lost = [
            DroppedSample(sample_id=name, reason=failure_reason(f), message=f.message)
            for name, f in failures.items()
        ]
        kept = [s for s in group.samples if s.sample_id not in failures]
        await self._ledger.scored(
            {s.sample_id: (r.reward, r.score) for s in kept for r in [group.rewards[s.sample_id]]}
        )
        if (objection := self._objection(group, kept)) is not None:
            reason, message = objection
            lost += [
                DroppedSample(sample_id=s.sample_id, reason=reason, message=message) for s in kept
            ]
            kept = []
        await self._ledger.dropped(lost)
        group.samples = kept
        self._drops.keep(len(kept))
        self._drops.set_aside(FILTERED, sum(d.reason == FILTERED for d in lost))
        for drop in lost:
            if drop.reason != FILTERED:
                self._drops.drop(drop.reason, drop.message)
        step.score.advance(asked)
        step.evaluate.advance(asked)

    def _objection(self, group: Group, kept: Sequence[Sample]) -> tuple[str, str] | None:
        """(reason, message) when a group is not to be trained on."""
        too_small = f"{len(kept)} valid samples of prompt {group.prompt.prompt_id}"
        if len(kept) < self._settings.min_group:
            return "group_too_small", too_small
        rule = self._settings.group_filter
        verdict = FilterVerdict.KEEP if rule is None else verdict_on(rule, group, kept)
        if verdict is FilterVerdict.TOO_FEW_SCORES:
            return "group_too_small", too_small
        return None if verdict is FilterVerdict.KEEP else (FILTERED, str(verdict))


def _num_samples(group: Group) -> int:
    return len(group.samples)


def _num_tokens(group: Group) -> int:
    return sum(len(s.token_ids) for s in group.samples)

"""Evaluation of a policy in training: a fixed set of prompts is completed and scored.

Nothing here is trained on, so none of it is in the ledger. The seeds are the same at every
evaluation: two of them differ by the weights alone. Rewards count as the scorer gives them, without
penalties. A sample that cannot be made or scored is counted by its reason and left out.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from quartet.algorithms import pass_at_k
from quartet.data.samples import Prompt
from quartet.errors import DataError, FatalError, InfraError
from quartet.obs.progress import Phase, Progress
from quartet.trainer.drops import reason_of
from quartet.trainer.experience import Group, Sample
from quartet.trainer.generation import GenerationSettings, Producer, take
from quartet.trainer.metrics import Metrics
from quartet.trainer.pipeline import ISOLATED_SAMPLES
from quartet.trainer.scoring import Scoring, failure_reason
from quartet.trainer.seeds import evaluation_seed
from quartet.types import Failure, PromptGroup, Reward

EVERYTHING = "eval"
"""Begins the names of what is over all data sources; those of source d begin with eval_<d>."""


class Evaluation:
    """Evaluates the weights that the rollout services hold, again and again on the same prompts."""

    def __init__(
        self,
        settings: GenerationSettings,
        prompts: Sequence[Prompt],
        *,
        producer: Producer,
        scoring: Scoring,
        max_groups_in_flight: int,
        progress: Progress,
    ) -> None:
        """Evaluate on `prompts`.

        Args:
            settings: How they are completed. Isolated calls are made one after the other, each
                with the same prompts every time.
            prompts: What is completed; each belongs to a data source.
            producer: Makes samples of prompts.
            scoring: Asks for rewards.
            max_groups_in_flight: Prompts that are completed at once.
            progress: Where to show how far it is.
        """
        self._settings = settings
        self._prompts = prompts
        self._producer = producer
        self._scoring = scoring
        self._progress = progress
        if settings.isolated:
            self._size = max(1, ISOLATED_SAMPLES // settings.num_samples)
            self._width = 1
        else:
            self._size = min(producer.groups_per_call(settings), max_groups_in_flight)
            self._width = max_groups_in_flight // self._size

    async def run(self, step: int, *, policy_version: int) -> Metrics:
        """Evaluate version `policy_version` of the policy after step `step`.

        Returns:
            The metrics, all of them named eval...: docs/metrics.md.

        Raises:
            FatalError: a service gave numbers that are not finite, or answered with other weights.
        """
        groups = [Group(index=i, prompt=prompt) for i, prompt in enumerate(self._prompts)]
        failed: Counter[str] = Counter()
        slots = asyncio.Semaphore(self._width)
        total = len(groups) * self._settings.num_samples
        with self._progress.phase(f"step {step} eval", total=total, unit="samples") as phase:
            async with asyncio.TaskGroup() as tasks:
                for start in range(0, len(groups), self._size):
                    part = groups[start : start + self._size]
                    tasks.create_task(self._part(step, part, policy_version, slots, failed, phase))
        return (
            evaluation_metrics(groups, num_samples=self._settings.num_samples)
            | {f"{EVERYTHING}_num_failed": float(failed.total())}
            | {f"{EVERYTHING}_failed/{name}": float(n) for name, n in sorted(failed.items())}
        )

    async def _part(
        self,
        step: int,
        groups: Sequence[Group],
        policy_version: int,
        slots: asyncio.Semaphore,
        failed: Counter[str],
        phase: Phase,
    ) -> None:
        """Complete and score the prompts of one Generate call."""
        async with slots:
            failed.update(await self._generate(step, groups, policy_version))
            failed.update(await self._score([g for g in groups if g.samples]))
        phase.advance(len(groups) * self._settings.num_samples)

    async def _generate(self, step: int, groups: Sequence[Group], policy_version: int) -> list[str]:
        """Fill in the groups' samples; returns the reasons of those that are missing."""
        requests = [self._request(step, group.prompt) for group in groups]
        try:
            outcomes = await self._producer.make(
                groups, requests, settings=self._settings, policy_version=policy_version
            )
        except (DataError, InfraError) as error:
            # Training will find out whether the service is gone for good.
            return [_reason("rollout", error)] * sum(r.num_samples for r in requests)
        missing: list[str] = []
        for group, made in zip(groups, outcomes, strict=True):
            missing += [drop.reason for drop in take(group, made)]
            for sample in group.samples:
                _check_version(sample, policy_version)
        return missing

    async def _score(self, groups: Sequence[Group]) -> list[str]:
        """Fill in the groups' rewards; returns the reasons of those that are missing."""
        try:
            failures = await self._scoring.run(groups)
        except (DataError, InfraError) as error:
            return [_reason("reward", error)] * sum(len(g.samples) for g in groups)
        return [failure_reason(failure) for failed in failures for failure in failed.values()]

    def _request(self, step: int, prompt: Prompt) -> PromptGroup:
        """A prompt, with names of its own at each evaluation and the same seeds at all of them."""
        indices = range(self._settings.num_samples)
        name = f"eval/{step}/{prompt.prompt_id}"
        return PromptGroup(
            group_id=name,
            prompt_token_ids=prompt.token_ids,
            num_samples=self._settings.num_samples,
            sample_ids=tuple(f"{name}/{i}" for i in indices),
            seeds=tuple(
                evaluation_seed(run_seed=self._settings.seed, prompt_id=prompt.prompt_id, index=i)
                for i in indices
            ),
        )


def evaluation_metrics(groups: Sequence[Group], *, num_samples: int) -> Metrics:
    """What the samples of an evaluation say, for each data source and over all of them.

    Every prompt weighs the same, also one of whose samples some failed; a prompt without any
    score is left out. Over nothing there is no mean, and so no metric.

    Args:
        groups: each prompt's samples, and the rewards of those that were scored.
        num_samples: samples asked for of each prompt, n.
    """
    by_source: dict[str, list[Group]] = {}
    for group in groups:
        by_source.setdefault(group.prompt.datasource, []).append(group)
    metrics: Metrics = {}
    for source, members in sorted(by_source.items()):
        head = f"{EVERYTHING}_{source}"
        metrics |= _passes(head, members, num_samples) | _lengths(head, members)
    scored = sum(len(group.rewards) for group in groups)
    return metrics | _lengths(EVERYTHING, groups) | {f"{EVERYTHING}_num_samples": float(scored)}


def metric_names(sources: Iterable[str], *, num_samples: int) -> set[str]:
    """Every metric with a mean that an evaluation may have."""
    lengths = ("response_length_mean", "truncated_rate")
    passes = ("pass1", f"pass{num_samples}", *(f"pass_at_{k}" for k in _ks(num_samples)))
    names = {f"{EVERYTHING}_{source}_{name}" for source in sources for name in (*passes, *lengths)}
    return names | {f"{EVERYTHING}_{name}" for name in lengths}


def is_pass_at_k(name: str) -> bool:
    """Whether a metric is there only where scores are 0 or 1."""
    return "_pass_at_" in name


def _passes(head: str, groups: Sequence[Group], num_samples: int) -> Metrics:
    """pass1 and pass<n> as OpenRLHF has them; pass@k where every score is 0 or 1."""
    known: list[list[Reward]] = [list(g.rewards.values()) for g in groups if g.rewards]
    if not known:
        return {}
    rewards = [[r.reward for r in group] for group in known]
    metrics = {
        f"{head}_pass{num_samples}": _mean(max(group) for group in rewards),
        f"{head}_pass1": _mean(_mean(group) for group in rewards),
    }
    scores = [[r.score for r in group] for group in known]
    if not all(score in (0.0, 1.0) for group in scores for score in group):
        return metrics
    for k in _ks(num_samples):
        # A prompt that lost samples says nothing of more tries than it has left.
        tries = [(len(group), sum(map(int, group))) for group in scores if len(group) >= k]
        if tries:
            metrics[f"{head}_pass_at_{k}"] = _mean(pass_at_k(n, c, k) for n, c in tries)
    return metrics


def _lengths(head: str, groups: Sequence[Group]) -> Metrics:
    samples = [sample for group in groups for sample in group.samples]
    if not samples:
        return {}
    return {
        f"{head}_response_length_mean": _mean(s.response_length for s in samples),
        f"{head}_truncated_rate": _mean(s.truncated for s in samples),
    }


def _ks(num_samples: int) -> list[int]:
    """The numbers of tries for which pass@k is given: powers of two, and all of them."""
    powers = (1 << i for i in range(num_samples.bit_length()))
    return sorted({k for k in powers if k <= num_samples} | {num_samples})


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(np.fromiter(values, np.float64)))


def _reason(where: str, error: DataError | InfraError) -> str:
    """Why all samples of a call are missing."""
    return reason_of(
        where,
        Failure(error_class=error.error_class, reason=error.info.reason, message=error.message),
    )


def _check_version(sample: Sample, policy_version: int) -> None:
    """An evaluation of other weights than it is recorded for would choose a wrong checkpoint."""
    found = {sample.first_policy_version, sample.last_policy_version}
    if found != {policy_version}:
        raise FatalError(
            f"rollout {sample.replica} answered an evaluation of version {policy_version} "
            f"with version {', '.join(map(str, sorted(found)))}",
            reason="EVALUATED_OTHER_WEIGHTS",
            sample_id=sample.sample_id,
            replica=sample.replica,
        )

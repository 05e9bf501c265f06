"""The numbers of a PPO step, by the names that users of OpenRLHF know (docs/metrics.md)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quartet.algorithms import row_means
from quartet.trainer.experience import Experience
from quartet.trainer.shaping import Lesson
from quartet.trainer.sinks import SampleText
from quartet.trainer.training import TrainingReport

Metrics = dict[str, float]

LOGPROB_GAP = "rollout_logprob_gap"
"""Largest |rollout's - learner's log-probability| over all trained tokens of a step."""


def rollout_metrics(lesson: Lesson, *, max_len: int) -> Metrics:
    """What the samples of a step say: rewards, lengths, KL. Means over samples."""
    experience = lesson.experience
    lengths, responses = experience.lengths, experience.response_lengths
    metrics: Metrics = {
        "reward": _mean(lesson.rewards),
        "score": _mean(np.array([r.score for r in experience.rewards])),
        "return": _mean(lesson.sequence_returns),
        "response_length": _mean(responses),
        "total_length": _mean(lengths),
        "response_clip_ratio": _mean(lengths >= max_len),
        "truncated": _mean(experience.truncated),
        "rollout/reward_mean": _mean(lesson.rewards),
        "rollout/reward_std": float(np.std(lesson.rewards)) if len(lesson.rewards) else 0.0,
        "rollout/response_length_mean": _mean(responses),
        "rollout/truncated_rate": _mean(experience.truncated),
        "rollout/num_samples": float(len(experience)),
        "num_samples_trained": float(len(experience)),
    }
    if len(set(experience.groups.tolist())) < len(experience):
        metrics["group_reward_std"] = _mean(lesson.group_reward_std)
    # The names above win over what a reward function calls its own numbers.
    return _extra_logs(experience) | metrics | _kl_metrics(lesson) | gap_metrics(experience)


def gap_metrics(experience: Experience) -> Metrics:
    """How far rollout engine and learner disagree on the sampled tokens.

    They can be compared only where the engine sampled from the whole distribution: after top-p or
    top-k its log-probabilities are those of a cut one.
    """
    spec = experience.logprob_spec
    if spec.top_p != 1.0 or spec.top_k != -1:
        return {}
    gap = np.abs(experience.rollout_logprobs - experience.old_logprobs)[experience.action_mask]
    return {LOGPROB_GAP: float(gap.max(initial=0.0)), f"{LOGPROB_GAP}_mean": _mean(gap)}


def training_metrics(policy: TrainingReport | None, critic: TrainingReport | None) -> Metrics:
    """What the learners say. `policy` is None while it is frozen, `critic` where there is none."""
    metrics: Metrics = {}
    for report, role in ((policy, "actor"), (critic, "critic")):
        if report is None or report.num_steps == 0:
            continue
        metrics |= report.means.means()
        metrics[f"{role}_lr"] = report.lr
        metrics[f"{role}_grad_norm"] = report.grad_norm
        metrics[f"{role}_optimizer_steps"] = float(report.num_steps)
        metrics[f"{role}_skipped_steps"] = float(report.num_skipped)
    if policy is not None and "ppo_ratio" in policy.first:
        # 1 up to rounding: nothing was updated yet, so anything else is a fault.
        metrics["ppo_ratio_first"] = policy.first["ppo_ratio"]
    return metrics


def sample_texts(lesson: Lesson, texts: list[str]) -> list[SampleText]:
    """The first samples of a step with their completions' `texts`."""
    shown = len(texts)
    return [
        SampleText(
            sample_id=sample.sample_id,
            prompt=sample.prompt.text,
            completion=text,
            reward=float(reward),
            score=outcome.score,
            label=sample.prompt.label,
            num_tokens=sample.response_length,
            finish_reason=str(sample.finish_reason),
        )
        for sample, outcome, reward, text in zip(
            lesson.experience.samples[:shown],
            lesson.experience.rewards[:shown],
            lesson.rewards[:shown],
            texts,
            strict=True,
        )
    ]


def _kl_metrics(lesson: Lesson) -> Metrics:
    experience = lesson.experience
    if lesson.kl is None or experience.ref_logprobs is None:
        return {}
    mask, lengths = experience.action_mask, experience.lengths
    difference = experience.old_logprobs.astype(np.float64) - experience.ref_logprobs
    return {
        "kl": _mean(row_means(lesson.kl, mask, lengths)),
        "logprobs_diff": _mean(row_means(difference, mask, lengths)),
    }


def _extra_logs(experience: Experience) -> Metrics:
    """Means of what reward functions log, each over the samples that have it."""
    columns: dict[str, list[float]] = {}
    for reward in experience.rewards:
        for name, value in reward.extra_logs.items():
            columns.setdefault(name, []).append(value)
    return {name: _mean(np.array(values)) for name, values in sorted(columns.items())}


def _mean(values: NDArray[Any]) -> float:
    """Mean in float64; 0 of nothing."""
    return float(np.mean(values, dtype=np.float64)) if values.size else 0.0

"""`quartet train rm`: a reward model from pairs of answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from quartet.config import RmConfig
from quartet.data import PreferencePair, eval_source, fingerprint_of, load_pairs, pair_batch
from quartet.errors import ConfigError
from quartet.obs.progress import Progress
from quartet.trainer.inputs import policy_tokenizer, say_report
from quartet.trainer.metrics import Metrics
from quartet.trainer.offline import Lessons, in_calls, offline_job
from quartet.trainer.rooms import Trainee
from quartet.trainer.run import Job, conduct
from quartet.types import ForwardOutput, Head, PairwiseLoss, TrainSamples

MIN_STD = 1e-8
"""Least standard deviation of rewards that is put into config.json, as a divisor."""

DEFAULT_EVAL_SHARE, DEFAULT_EVAL_PAIRS = 0.01, 100
"""Without --eval.dataset: mean and std of rewards come from so many of the first pairs."""


def main(config: RmConfig) -> int:
    """Train, and return the exit code."""
    return conduct(config, lambda progress: prepare(config, progress))


def prepare(config: RmConfig, progress: Progress) -> Job:
    """Read everything, before anything is started.

    Raises:
        ConfigError: tokenizer or data are missing or of no use.
    """
    tokenizer = policy_tokenizer(config)
    seed = config.train.seed
    rows = say_report(load_pairs(config.data, tokenizer, seed=seed), progress)
    source = eval_source(config.eval, max_samples=config.data.max_samples)
    if source is not None:
        eval_rows = say_report(
            load_pairs(config.data, tokenizer, seed=seed, source=source), progress
        )
    else:
        count = min(len(rows), max(DEFAULT_EVAL_PAIRS, int(DEFAULT_EVAL_SHARE * len(rows))))
        eval_rows = rows[:count]
        progress.say(
            f"no --eval.dataset: evaluation, and the mean and std of rewards in config.json, "
            f"are of the first {count} training pairs"
        )
    lessons = Lessons(
        head=Head.REWARD,
        rows=rows,
        to_samples=batch_maker(config),
        loss=pairwise_loss(config),
        tokenizer_fingerprint=fingerprint_of(tokenizer),
        eval_rows=eval_rows,
        evaluate=lambda trainee, pairs: evaluate(config, trainee, pairs),
        export_values=statistics,
    )
    return offline_job(config, lessons)


def statistics(metrics: Metrics) -> dict[str, float]:
    """Mean and std of rewards, under the names that --reward.normalize_enable looks for."""
    return {"mean": metrics["reward_mean"], "std": max(metrics["reward_std"], MIN_STD)}


def pairwise_loss(config: RmConfig) -> PairwiseLoss:
    """The loss that the flags ask for.

    Raises:
        ConfigError: there is no such loss.
    """
    match config.model.loss_type:
        case "sigmoid" | "logexp" as kind:
            return PairwiseLoss(
                type=kind,
                compute_in_fp32=config.model.compute_fp32_loss_enable,
                aux_loss_coef=config.model.aux_loss_coef,
            )
        case unknown:
            raise ConfigError(
                f"model.loss_type {unknown} is no loss of a reward model",
                field="model.loss_type",
                value=unknown,
                remedy="use sigmoid or logexp",
            )


def batch_maker(config: RmConfig) -> Callable[[Sequence[PreferencePair]], TrainSamples]:
    """Pairs as a batch; margins go along only where the loss is to use them."""

    def make(pairs: Sequence[PreferencePair]) -> TrainSamples:
        batch = pair_batch(pairs)
        return batch if config.model.margin_loss_enable else replace(batch, margins=None)

    return make


async def evaluate(config: RmConfig, trainee: Trainee, pairs: Sequence[PreferencePair]) -> Metrics:
    """Loss and accuracy over all pairs, mean and std (n - 1) over all their rewards."""
    make = batch_maker(config)
    parts: list[NDArray[np.float32]] = []
    margins: list[NDArray[np.float32]] = []
    for part in in_calls([len(p.chosen) + len(p.rejected) for p in pairs]):
        batch = make(pairs[part])
        (result,) = await trainee.forward([batch.sequences], output=ForwardOutput.REWARDS)
        parts.append(result.output)
        count = len(result.output) // 2
        margins.append(np.zeros(count, np.float32) if batch.margins is None else batch.margins)
    rewards = np.concatenate(parts).astype(np.float64)
    gap = rewards[0::2] - rewards[1::2]
    # logexp is the sigmoid loss without a margin.
    margin = np.concatenate(margins) if config.model.loss_type == "sigmoid" else 0.0
    return {
        "eval_loss": float(np.mean(np.logaddexp(0.0, margin - gap))),
        "acc_mean": float(np.mean(gap > 0)),
        "reward_mean": float(np.mean(rewards)),
        "reward_std": float(np.std(rewards, ddof=1)),
    }

"""`quartet train dpo`: direct preference optimisation, cDPO and IPO, from pairs of answers.

The reference model is a service. Each pair is evaluated under it once, one batch ahead of the
learner, and its log-probabilities are kept for the epochs and evaluations that follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from quartet.config import DpoConfig
from quartet.data import PreferencePair, eval_source, fingerprint_of, load_pairs, pair_batch
from quartet.obs.progress import Progress
from quartet.trainer.inputs import policy_tokenizer, say_report
from quartet.trainer.metrics import Metrics
from quartet.trainer.offline import Lessons, OfflineLoop, in_calls
from quartet.trainer.rooms import Reference, Trainee
from quartet.trainer.run import Job, Run, conduct
from quartet.trainer.services import connect_dpo, local_services
from quartet.types import DpoLoss, ForwardOutput, Head, TrainSamples


def main(config: DpoConfig) -> int:
    """Train, and return the exit code."""
    return conduct(config, lambda progress: prepare(config, progress))


def prepare(config: DpoConfig, progress: Progress) -> Job:
    """Read everything, before anything is started.

    Raises:
        ConfigError: tokenizer or data are missing or of no use.
    """
    tokenizer = policy_tokenizer(config)
    fingerprint, seed = fingerprint_of(tokenizer), config.train.seed
    rows = say_report(load_pairs(config.data, tokenizer, seed=seed), progress)
    eval_rows: list[PreferencePair] = []
    if (source := eval_source(config.eval, max_samples=config.data.max_samples)) is not None:
        eval_rows = say_report(
            load_pairs(config.data, tokenizer, seed=seed, source=source), progress
        )

    async def body(run: Run) -> None:
        async with AsyncExitStack() as stack:
            trainee, reference = await connect_dpo(config, run, stack, fingerprint=fingerprint)
            lessons = dpo_lessons(config, rows, eval_rows, reference, fingerprint=fingerprint)
            await OfflineLoop(config, run, lessons, trainee).run()

    return Job(services=local_services(config), body=body)


def dpo_lessons(
    config: DpoConfig,
    rows: Sequence[PreferencePair],
    eval_rows: Sequence[PreferencePair],
    reference: Reference,
    *,
    fingerprint: str,
) -> Lessons[PreferencePair]:
    """What DPO trains on, and how."""
    references = PairReferences(reference)
    loss = dpo_loss(config)

    async def evaluate(trainee: Trainee, pairs: Sequence[PreferencePair]) -> Metrics:
        return await evaluate_pairs(loss, references, trainee, pairs)

    return Lessons(
        head=Head.LM,
        rows=rows,
        to_samples=references.to_samples,
        loss=loss,
        tokenizer_fingerprint=fingerprint,
        fetch=references.fetch,
        eval_rows=eval_rows,
        evaluate=evaluate,
    )


def dpo_loss(config: DpoConfig) -> DpoLoss:
    """The loss that the flags ask for."""
    model = config.model
    return DpoLoss(
        beta=model.beta,
        ipo=model.ipo_enable,
        ipo_sum=model.ipo_sum,
        label_smoothing=model.label_smoothing,
        nll_loss_coef=model.nll_loss_coef,
        aux_loss_coef=model.aux_loss_coef,
    )


class PairReferences:
    """Log-probabilities of pairs under the reference model, each computed once and kept."""

    def __init__(self, reference: Reference) -> None:
        """Ask `reference`, which does not change."""
        self._reference = reference
        self._known: dict[str, NDArray[np.float32]] = {}

    async def fetch(self, pairs: Sequence[PreferencePair]) -> None:
        """Evaluate those pairs that have not been."""
        new = list({p.pair_id: p for p in pairs if p.pair_id not in self._known}.values())
        for part in in_calls([_size(pair) for pair in new]):
            chunks = [pair_batch([pair]).sequences for pair in new[part]]
            found = await self._reference.compute_logprobs(chunks, temperature=1.0)
            self._known |= zip((pair.pair_id for pair in new[part]), found, strict=True)

    def to_samples(self, pairs: Sequence[PreferencePair]) -> TrainSamples:
        """Fetched pairs as a batch: chosen, rejected, chosen, rejected, ..."""
        known = [self._known[pair.pair_id] for pair in pairs]
        # The loss of DPO has no margin.
        return replace(pair_batch(pairs), ref_logprobs=np.concatenate(known), margins=None)


async def evaluate_pairs(
    loss: DpoLoss, references: PairReferences, trainee: Trainee, pairs: Sequence[PreferencePair]
) -> Metrics:
    """Loss, accuracy and implicit rewards: means over all pairs, not over batches."""
    await references.fetch(pairs)
    gaps: list[NDArray[np.float64]] = []
    lengths: list[NDArray[np.int64]] = []
    nll: list[NDArray[np.float64]] = []
    for part in in_calls([_size(pair) for pair in pairs]):
        batch = references.to_samples(pairs[part])
        (result,) = await trainee.forward([batch.sequences], output=ForwardOutput.LOGPROBS)
        mask = np.asarray(batch.action_mask)
        logprobs = np.where(mask, result.output, 0.0).astype(np.float64)
        ref = np.where(mask, np.asarray(batch.ref_logprobs), 0.0)
        starts = batch.sequences.offsets[:-1]
        count = np.add.reduceat(mask.astype(np.int64), starts)
        gaps.append(np.add.reduceat(logprobs - ref, starts))
        lengths.append(count)
        nll.append(-np.add.reduceat(logprobs, starts) / count)
    gap, length = np.concatenate(gaps), np.concatenate(lengths)
    chosen_nll = float(np.mean(np.concatenate(nll)[0::2]))
    per_pair = pair_losses(loss, gap, length)
    rewards = loss.beta * gap
    metrics = {
        "eval_loss": float(np.mean(per_pair)) + loss.nll_loss_coef * chosen_nll,
        "acc_mean": float(np.mean(rewards[0::2] > rewards[1::2])),
        "chosen_reward": float(np.mean(rewards[0::2])),
        "reject_reward": float(np.mean(rewards[1::2])),
    }
    return metrics | ({"nll_loss": chosen_nll} if loss.nll_loss_coef else {})


def pair_losses(
    loss: DpoLoss, gaps: NDArray[np.float64], lengths: NDArray[np.int64]
) -> NDArray[np.float64]:
    """[pairs] preference losses, as the learner has them (see its dpo_loss).

    Args:
        loss: form and constants.
        gaps: [2 * pairs] sums of log pi - log ref over each answer, chosen and rejected in turn.
        lengths: [2 * pairs] tokens of each answer.
    """
    if loss.ipo:
        per_answer = gaps if loss.ipo_sum else gaps / np.maximum(lengths, 1)
        return np.square(per_answer[0::2] - per_answer[1::2] - 1 / (2 * loss.beta))
    x = loss.beta * (gaps[0::2] - gaps[1::2])
    smoothing = loss.label_smoothing
    return (1 - smoothing) * np.logaddexp(0.0, -x) + smoothing * np.logaddexp(0.0, x)


def _size(pair: PreferencePair) -> int:
    return len(pair.chosen) + len(pair.rejected)

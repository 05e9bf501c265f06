"""`quartet train sft`: supervised fine-tuning, and continued pre-training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quartet.config import SftConfig
from quartet.data import TokenSample, eval_source, fingerprint_of, load_sft, token_batch
from quartet.obs.progress import Progress
from quartet.trainer.inputs import policy_tokenizer, say_report
from quartet.trainer.metrics import Metrics
from quartet.trainer.offline import Lessons, in_calls, offline_job
from quartet.trainer.rooms import Trainee
from quartet.trainer.run import Job, conduct
from quartet.types import ForwardOutput, Head, SftLoss


def main(config: SftConfig) -> int:
    """Train, and return the exit code."""
    return conduct(config, lambda progress: prepare(config, progress))


def prepare(config: SftConfig, progress: Progress) -> Job:
    """Read everything, before anything is started.

    Raises:
        ConfigError: tokenizer or data are missing or of no use.
    """
    tokenizer = policy_tokenizer(config)
    pretrain, seed = config.model.pretrain_mode_enable, config.train.seed
    built = say_report(load_sft(config.data, tokenizer, seed=seed, pretrain=pretrain), progress)
    eval_rows: list[TokenSample] = []
    if (source := eval_source(config.eval, max_samples=config.data.max_samples)) is not None:
        loaded = load_sft(config.data, tokenizer, seed=seed, pretrain=pretrain, source=source)
        eval_rows = say_report(loaded, progress)
    lessons = Lessons(
        head=Head.LM,
        rows=built,
        to_samples=token_batch,
        loss=SftLoss(aux_loss_coef=config.model.aux_loss_coef),
        tokenizer_fingerprint=fingerprint_of(tokenizer),
        eval_rows=eval_rows,
        evaluate=evaluate,
    )
    return offline_job(config, lessons)


async def evaluate(trainee: Trainee, rows: Sequence[TokenSample]) -> Metrics:
    """Mean negative log-likelihood over all learnt tokens of all rows, not over batches."""
    total, tokens = 0.0, 0
    for part in in_calls([len(row) for row in rows]):
        batch = token_batch(rows[part])
        (result,) = await trainee.forward([batch.sequences], output=ForwardOutput.LOGPROBS)
        mask = np.asarray(batch.action_mask)
        total -= float(np.sum(result.output[mask], dtype=np.float64))
        tokens += int(mask.sum())
    loss = total / max(tokens, 1)
    return {"gpt_loss": loss, "eval_loss": loss, "num_tokens": float(tokens)}

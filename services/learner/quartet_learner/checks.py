"""What a step must fulfil before any rank touches it. Each failure names field, value and remedy.

These run on rank 0, before the other ranks hear of the step: nothing that a caller can get wrong
may fail inside a collective.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quartet.errors import ConfigError, RequestError
from quartet.types import (
    DpoLoss,
    ForwardOutput,
    Head,
    LogprobKind,
    LogprobSpec,
    Loss,
    PairwiseLoss,
    PolicyLoss,
    RunSpec,
    SequenceBatch,
    SftLoss,
    TrainSamples,
    ValueLoss,
)
from quartet.types.requests import ForwardRequest
from quartet_learner.constants import check_constants
from quartet_learner.samples import PER_TOKEN, names_of, present

HEADS: dict[type[Loss], Head] = {
    PolicyLoss: Head.LM,
    SftLoss: Head.LM,
    DpoLoss: Head.LM,
    ValueLoss: Head.VALUE,
    PairwiseLoss: Head.REWARD,
}
"""The head that each loss trains."""


def comes_in_pairs(loss: Loss) -> bool:
    """True for the losses that compare a chosen and a rejected sequence."""
    return isinstance(loss, PairwiseLoss | DpoLoss)


def needed_fields(loss: Loss) -> tuple[str, ...]:
    """Arrays of TrainSamples without which the loss cannot be computed."""
    if isinstance(loss, PolicyLoss):
        names = ["action_mask", "advantages", "old_logprobs"]
        if loss.kl_loss is not None:
            names.append("ref_logprobs")
        if loss.mismatch_correction is not None:
            names.append("rollout_logprobs")
        return tuple(names)
    if isinstance(loss, ValueLoss):
        clipped = ("old_values",) if loss.value_clip is not None else ()
        return ("action_mask", "returns", *clipped)
    if isinstance(loss, SftLoss):
        return ("action_mask",)
    if isinstance(loss, DpoLoss):
        return ("action_mask", "ref_logprobs")
    return ()


def used_fields(loss: Loss, samples: TrainSamples) -> tuple[str, ...]:
    """What the loss needs, and what it logs a metric from when it is there."""
    needed = needed_fields(loss)
    if not isinstance(loss, PolicyLoss):
        return needed
    logged = ("ref_logprobs", "rollout_logprobs")
    there = present(samples)
    return (*needed, *(name for name in logged if name in there and name not in needed))


def check_run(
    spec: RunSpec,
    experts_taken: int,
    *,
    zero_stage: int = 0,
    reentrant: bool = False,
    adapters: bool = False,
) -> None:
    """Raise for what the learner cannot do in a run.

    Args:
        spec: the run.
        experts_taken: by each token; 0 for a model without a router.
        zero_stage: the one that DeepSpeed is given.
        reentrant: whether gradients are checkpointed in the reentrant way.
        adapters: whether the model has low-rank adapters.

    Raises:
        ConfigError: a router loss that this model cannot have, or Muon on parts or factors of
            matrices.
    """
    if spec.optimizer.type == "muon" and zero_stage > 0:
        raise ConfigError(
            f"Muon needs whole matrices, and ZeRO stage {zero_stage} cuts them",
            field="optim",
            value="muon",
            remedy="use --ds.zero_stage 0 with --ds.param_dtype fp32 and no --ds.adam_offload",
        )
    if spec.optimizer.type == "muon" and adapters:
        raise ConfigError(
            "Muon moves whole matrices, and adapters are factors of them",
            field="optim",
            value="muon",
            remedy="use --optim adam, or --ds.lora.rank 0",
        )
    if spec.with_router_loss:
        _check_router_loss(experts_taken, reentrant)


def _check_router_loss(experts_taken: int, reentrant: bool) -> None:
    if not experts_taken:
        raise ConfigError(
            "the model has no router, so it has no balance loss",
            field="aux_loss_coef",
            remedy="leave it at 0, or train a mixture of experts",
        )
    if reentrant:
        raise ConfigError(
            "the balance loss has no gradient under reentrant gradient checkpointing",
            field="aux_loss_coef",
            remedy="leave gradient_checkpointing_reentrant away",
        )


def check_forward(request: ForwardRequest, output: ForwardOutput) -> None:
    """Raise RequestError for what the head cannot compute."""
    if request.output not in (None, output):
        raise _wrong(
            f"this learner's head computes {output}",
            "output",
            str(request.output),
            f"ask for {output}, or ask another learner",
        )
    if request.with_entropy and output is not ForwardOutput.LOGPROBS:
        raise _wrong("only head lm has an entropy", "with_entropy", "true", "ask for output alone")


def check_loss(loss: Loss, head: Head, *, routed: bool = False) -> None:
    """Raise RequestError for a loss that does not fit head or run, or constants out of range.

    Args:
        loss: of the step.
        head: of this learner.
        routed: whether the run was started with the loss of a router.
    """
    if HEADS[type(loss)] is not head:
        raise _wrong(
            f"a {type(loss).__name__} trains head {HEADS[type(loss)]}, this learner has {head}",
            field="loss",
            value=type(loss).__name__,
            remedy=f"send it to a learner with --learner.head {HEADS[type(loss)]}",
        )
    if loss.aux_loss_coef != 0 and not routed:
        raise _wrong(
            "the run was not started with a router loss",
            field="loss.aux_loss_coef",
            value=str(loss.aux_loss_coef),
            remedy="set with_router_loss in StartRun, or aux_loss_coef to 0",
        )
    check_constants(loss)


def check_samples(loss: Loss, parts: Sequence[TrainSamples]) -> None:
    """Raise RequestError for chunks that cannot be joined or lack what the loss needs."""
    if not parts or not any(len(part.sequences) for part in parts):
        raise _wrong("the step has no samples", "samples", "0", "send at least one sequence")
    for part in parts[1:]:
        if present(part) != present(parts[0]):
            odd = sorted(present(part) ^ present(parts[0]))[0]
            raise _wrong("only some chunks have it", f"samples.{odd}", "", "send it in all or none")
        if part.rollout_logprob_spec != parts[0].rollout_logprob_spec:
            raise _wrong(
                "chunks of one step have different kinds of rollout log-probabilities",
                "samples.rollout_logprob_spec",
                str(part.rollout_logprob_spec),
                "sample a batch with one set of sampling parameters",
            )
    for name in needed_fields(loss):
        if name not in present(parts[0]):
            raise _wrong(
                f"{type(loss).__name__} needs {name}",
                f"samples.{name}",
                "missing",
                f"send {name} with every chunk",
            )
    if isinstance(loss, PolicyLoss) and "rollout_logprobs" in present(parts[0]):
        _check_rollout_spec(loss, parts[0].rollout_logprob_spec)


def check_joined(loss: Loss, samples: TrainSamples, vocabulary: int, max_length: int) -> None:
    """Raise RequestError for arrays that are wrong inside: shapes, ids, masks, numbers."""
    sequences = samples.sequences
    check_sequences(sequences, vocabulary, max_length)
    for name in PER_TOKEN:
        array = getattr(samples, name)
        if array is not None and array.shape != (sequences.num_tokens,):
            raise _wrong(
                f"{name} has shape {list(array.shape)} for {sequences.num_tokens} tokens",
                f"samples.{name}",
                str(list(array.shape)),
                "send one number a token",
            )
    if comes_in_pairs(loss):
        _check_pairs(samples)
    mask = samples.action_mask
    if mask is None or isinstance(loss, PairwiseLoss):
        return
    firsts = sequences.offsets[:-1]
    if mask[firsts].any():
        row = int(np.flatnonzero(mask[firsts])[0])
        raise _wrong(
            "the first token of a sequence is trained, but nothing predicts it",
            "samples.action_mask",
            "true",
            "mask it, or begin the sequence with a token that is not trained",
            sample_id=names_of(sequences)[row],
        )
    if not mask.any():
        raise _wrong(
            "no token of the step is trained", "samples.action_mask", "all false", "drop the step"
        )
    for name in used_fields(loss, samples):
        _check_finite(name, getattr(samples, name), mask, sequences)


def check_sequences(sequences: SequenceBatch, vocabulary: int, max_length: int) -> None:
    """Raise RequestError for ids outside the vocabulary, and for lengths out of range."""
    ids = sequences.token_ids
    bad = np.flatnonzero((ids < 0) | (ids >= vocabulary))
    if len(bad):
        raise _wrong(
            f"token id {ids[bad[0]]} is not in the vocabulary of {vocabulary}",
            "sequences.token_ids",
            str(ids[bad[0]]),
            "use the tokenizer of the learner's model",
            sample_id=_name_at(sequences, int(bad[0])),
        )
    long = np.flatnonzero(sequences.lengths > (max_length or np.inf))
    if len(long):
        raise _wrong(
            f"a sequence of {sequences.lengths[long[0]]} tokens; the learner takes {max_length}",
            "sequences.lengths",
            str(sequences.lengths[long[0]]),
            "lower the lengths of prompts and completions, or raise the learner's --data.max_len",
            sample_id=names_of(sequences)[int(long[0])],
        )


def _check_rollout_spec(loss: PolicyLoss, spec: LogprobSpec | None) -> None:
    """The rollout's log-probabilities must be of the distribution that the learner computes.

    The learner computes log softmax(logits / temperature) over the whole vocabulary. Raw
    log-probabilities are that at temperature 1 only: another temperature is that of another policy,
    whatever is done with them. Those after top-p or top-k are renormalised over the tokens kept, so
    the ratio of a mismatch correction would be biased by the mass left out.
    """
    field = "samples.rollout_logprob_spec"
    corrected = loss.mismatch_correction is not None
    if spec is None and corrected:
        raise _wrong(
            "the kind of the rollout log-probabilities is not known",
            field,
            "missing",
            "send the rollout's logprob_spec with the samples",
        )
    if spec is None:
        return
    if spec.kind is LogprobKind.RAW and (loss.temperature, spec.temperature) != (1.0, 1.0):
        raise _wrong(
            f"raw rollout log-probabilities do not fit temperature {loss.temperature}",
            field,
            f"raw, temperature {spec.temperature}",
            "ask the rollout for processed log-probabilities, or sample at temperature 1",
        )
    if spec.kind is LogprobKind.PROCESSED and spec.temperature != loss.temperature:
        raise _wrong(
            f"the rollout sampled at {spec.temperature}, the loss says {loss.temperature}",
            field,
            f"temperature {spec.temperature}",
            "send the temperature that sampled as loss.temperature",
        )
    if corrected and (spec.top_p < 1.0 or spec.top_k > 0):
        raise _wrong(
            "a mismatch correction does not fit completions sampled with top-p or top-k",
            field,
            f"top_p {spec.top_p}, top_k {spec.top_k}",
            "sample with top_p 1 and top_k -1, or switch the correction off",
        )


def _check_pairs(samples: TrainSamples) -> None:
    count = len(samples.sequences)
    if count % 2:
        raise _wrong(
            f"{count} sequences are no pairs",
            "samples.sequences",
            str(count),
            "send chosen and rejected in turn, pairs whole within a chunk",
        )
    if samples.margins is not None and samples.margins.shape != (count // 2,):
        raise _wrong(
            f"{len(samples.margins)} margins for {count // 2} pairs",
            "samples.margins",
            str(len(samples.margins)),
            "send one margin a pair",
        )
    if samples.margins is not None and not np.isfinite(samples.margins).all():
        pair = int(np.flatnonzero(~np.isfinite(samples.margins))[0])
        raise _wrong(
            "a margin is not finite",
            "samples.margins",
            str(samples.margins[pair]),
            "drop the pair",
            sample_id=names_of(samples.sequences)[2 * pair],
        )


def _check_finite(name: str, array: np.ndarray, mask: np.ndarray, sequences: SequenceBatch) -> None:
    if array.dtype == bool:
        return
    bad = np.flatnonzero(mask & ~np.isfinite(array))
    if len(bad):
        raise _wrong(
            f"{name} is {array[bad[0]]} on a trained token",
            f"samples.{name}",
            str(array[bad[0]]),
            "drop the sample, and look for the replica that made it",
            sample_id=_name_at(sequences, int(bad[0])),
        )


def _name_at(sequences: SequenceBatch, place: int) -> str:
    row = int(np.searchsorted(sequences.offsets, place, side="right")) - 1
    return names_of(sequences)[row]


def _wrong(problem: str, field: str, value: str, remedy: str, sample_id: str = "") -> RequestError:
    return RequestError(
        problem,
        reason="INVALID_TRAIN_REQUEST",
        field=field,
        value=value,
        remedy=remedy,
        sample_id=sample_id,
    )

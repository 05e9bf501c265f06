"""The constants of a loss: each within its range, before any rank touches a step.

A number out of range would give a loss that is not finite, and the refusal of its gradient would
not say which number it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from quartet.errors import RequestError
from quartet.types import (
    DpoLoss,
    KlLoss,
    Loss,
    MismatchCorrection,
    PolicyLoss,
    ValueLoss,
)

Wrong = tuple[str, float | str, str, str]
"""Field below `loss`, value, what is wrong, remedy."""


def check_constants(loss: Loss) -> None:
    """Raise RequestError for the first constant that is out of range."""
    for field, value, problem, remedy in _wrong(loss):
        raise RequestError(
            problem,
            reason="INVALID_TRAIN_REQUEST",
            field=f"loss.{field}",
            value=str(value),
            remedy=remedy,
        )


def _wrong(loss: Loss) -> Iterator[Wrong]:
    yield from _weight("aux_loss_coef", loss.aux_loss_coef)
    if isinstance(loss, PolicyLoss):
        yield from _policy(loss)
    elif isinstance(loss, ValueLoss):
        yield from _value(loss)
    elif isinstance(loss, DpoLoss):
        yield from _dpo(loss)


def _policy(loss: PolicyLoss) -> Iterator[Wrong]:
    if not _above_0(loss.temperature):
        problem, remedy = "temperature must be above 0", "send the temperature that sampled"
        yield "temperature", loss.temperature, problem, remedy
    for name, value in (
        ("eps_clip_low", loss.eps_clip_low),
        ("eps_clip_high", loss.eps_clip_high),
    ):
        if not (math.isfinite(value) and value >= 0):
            yield name, value, f"{name} must not be negative", "use for example 0.2"
    if loss.dual_clip is not None and not (math.isfinite(loss.dual_clip) and loss.dual_clip > 1):
        yield "dual_clip", loss.dual_clip, "dual_clip must be above 1", "use for example 3"
    if loss.aggregation == "seq-mean-token-sum-norm" and loss.aggregation_length < 1:
        problem = "seq-mean-token-sum-norm needs a length"
        remedy = "send the longest completion in tokens"
        yield "aggregation_length", loss.aggregation_length, problem, remedy
    if loss.entropy_coef is not None:
        yield from _weight("entropy_coef", loss.entropy_coef)
    if loss.kl_loss is not None:
        yield from _kl(loss.kl_loss)
    if loss.mismatch_correction is not None:
        yield from _correction(loss.mismatch_correction)


def _kl(term: KlLoss) -> Iterator[Wrong]:
    yield from _weight("kl_loss.coef", term.coef)


def _correction(correction: MismatchCorrection) -> Iterator[Wrong]:
    unit = (correction.level, correction.gating)
    if correction.mode == "clip" and unit != ("token", "ratio"):
        yield (
            "mismatch_correction.mode",
            f"clip with level {correction.level} and gating {correction.gating}",
            "mode clip works on the ratios of tokens",
            "use mode mask, or level token and gating ratio",
        )
    if not correction.threshold_low <= correction.threshold_high:
        yield (
            "mismatch_correction.threshold_low",
            f"{correction.threshold_low} .. {correction.threshold_high}",
            "the band of the mismatch correction is empty",
            "make threshold_low the smaller one",
        )


def _value(loss: ValueLoss) -> Iterator[Wrong]:
    if loss.value_clip is not None and not _above_0(loss.value_clip):
        yield "value_clip", loss.value_clip, "value_clip must be above 0", "use for example 0.5"
    if loss.aggregation == "seq-mean-token-sum-norm":
        problem = "a value loss has no length to divide by"
        yield "aggregation", loss.aggregation, problem, "use for example token-mean"


def _dpo(loss: DpoLoss) -> Iterator[Wrong]:
    if not _above_0(loss.beta):
        yield "beta", loss.beta, "beta must be above 0", "use for example 0.1"
    if not 0 <= loss.label_smoothing < 0.5:
        problem = "label_smoothing must be at least 0 and below 0.5"
        yield "label_smoothing", loss.label_smoothing, problem, "use for example 0.1"
    yield from _weight("nll_loss_coef", loss.nll_loss_coef)


def _weight(name: str, value: float) -> Iterator[Wrong]:
    if not math.isfinite(value):
        yield name, value, f"{name} must be finite", "send a number"


def _above_0(value: float) -> bool:
    return math.isfinite(value) and value > 0

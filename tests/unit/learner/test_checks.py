"""Wrong steps are refused before any rank touches them, by name."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from quartet_learner import checks
from quartet_learner.samples import join, take

from quartet.errors import RequestError
from quartet.types import (
    DpoLoss,
    ForwardOutput,
    Head,
    KlLoss,
    LogprobKind,
    LogprobSpec,
    MismatchCorrection,
    PairwiseLoss,
    PolicyLoss,
    SequenceBatch,
    SftLoss,
    TrainSamples,
    ValueLoss,
)
from quartet.types.requests import ForwardRequest

CORRECTED = PolicyLoss(mismatch_correction=MismatchCorrection(level="token"))
PROCESSED = LogprobSpec(kind=LogprobKind.PROCESSED)


def make_samples(**changes) -> TrainSamples:
    sequences = SequenceBatch.of([[5, 6, 7], [8, 9, 3, 4]], ["a", "b"])
    numbers = np.linspace(-1, 0, 7, dtype=np.float32)
    samples = TrainSamples(
        sequences=sequences,
        action_mask=np.array([0, 1, 1, 0, 0, 1, 1], bool),
        advantages=numbers,
        old_logprobs=numbers,
        ref_logprobs=numbers,
        rollout_logprobs=numbers,
        returns=numbers,
        old_values=numbers,
        rollout_logprob_spec=PROCESSED,
    )
    return replace(samples, **changes)


def refuse(check, *arguments) -> RequestError:
    with pytest.raises(RequestError) as caught:
        check(*arguments)
    assert caught.value.info.remedy
    return caught.value


def test_good_samples_pass():
    for loss in (PolicyLoss(), CORRECTED, ValueLoss(), SftLoss(), DpoLoss(), PairwiseLoss()):
        checks.check_samples(loss, [make_samples()])
        checks.check_joined(loss, make_samples(), vocabulary=10, max_length=4)


@pytest.mark.parametrize(
    ("loss", "head"),
    [(PolicyLoss(), Head.VALUE), (ValueLoss(), Head.LM), (PairwiseLoss(), Head.VALUE)],
)
def test_a_loss_of_another_head(loss, head):
    assert "--learner.head" in refuse(checks.check_loss, loss, head).info.remedy


@pytest.mark.parametrize(
    ("loss", "field"),
    [
        (PolicyLoss(temperature=0.0), "loss.temperature"),
        (PolicyLoss(dual_clip=1.0), "loss.dual_clip"),
        (PolicyLoss(aggregation="seq-mean-token-sum-norm"), "loss.aggregation_length"),
        (PolicyLoss(aux_loss_coef=0.1), "loss.aux_loss_coef"),
        (PolicyLoss(eps_clip_low=-0.1), "loss.eps_clip_low"),
        (PolicyLoss(eps_clip_high=math.nan), "loss.eps_clip_high"),
        (PolicyLoss(entropy_coef=math.nan), "loss.entropy_coef"),
        (PolicyLoss(kl_loss=KlLoss(coef=math.inf)), "loss.kl_loss.coef"),
        (DpoLoss(beta=0.0), "loss.beta"),
        (DpoLoss(label_smoothing=0.5), "loss.label_smoothing"),
        (DpoLoss(nll_loss_coef=math.nan), "loss.nll_loss_coef"),
        (ValueLoss(value_clip=-0.5), "loss.value_clip"),
        (ValueLoss(aggregation="seq-mean-token-sum-norm"), "loss.aggregation"),
        (
            PolicyLoss(mismatch_correction=MismatchCorrection(level="seq", mode="clip")),
            "loss.mismatch_correction.mode",
        ),
        (
            PolicyLoss(
                mismatch_correction=MismatchCorrection(
                    level="token", threshold_low=2.0, threshold_high=1.0
                )
            ),
            "loss.mismatch_correction.threshold_low",
        ),
    ],
)
def test_constants_out_of_range(loss, field):
    assert refuse(checks.check_loss, loss, checks.HEADS[type(loss)]).info.field == field


@pytest.mark.parametrize(
    ("loss", "missing"),
    [
        (PolicyLoss(), "advantages"),
        (PolicyLoss(), "old_logprobs"),
        (PolicyLoss(kl_loss=KlLoss(coef=0.1)), "ref_logprobs"),
        (CORRECTED, "rollout_logprobs"),
        (ValueLoss(), "returns"),
        (ValueLoss(), "old_values"),
        (SftLoss(), "action_mask"),
        (DpoLoss(), "ref_logprobs"),
    ],
)
def test_what_the_loss_needs_must_be_there(loss, missing):
    error = refuse(checks.check_samples, loss, [make_samples(**{missing: None})])
    assert error.info.field == f"samples.{missing}"


def test_no_old_values_are_needed_without_a_clip():
    checks.check_samples(ValueLoss(value_clip=None), [make_samples(old_values=None)])


def test_an_empty_step():
    refuse(checks.check_samples, SftLoss(), [])


def test_chunks_must_carry_the_same_arrays():
    chunks = [make_samples(), make_samples(returns=None)]
    assert refuse(checks.check_samples, SftLoss(), chunks).info.field == "samples.returns"


OTHER_TEMPERATURES = [
    (LogprobSpec(kind=LogprobKind.RAW), 0.7, "raw"),
    (LogprobSpec(kind=LogprobKind.RAW, temperature=0.7), 1.0, "raw"),
    (LogprobSpec(kind=LogprobKind.PROCESSED, temperature=0.7), 1.0, "temperature 0.7"),
    (LogprobSpec(kind=LogprobKind.PROCESSED), 0.7, "temperature 1.0"),
]
CUT = [
    (None, 1.0, "missing"),
    (LogprobSpec(kind=LogprobKind.PROCESSED, top_p=0.9), 1.0, "top_p 0.9"),
    (LogprobSpec(kind=LogprobKind.PROCESSED, top_k=50), 1.0, "top_k 50"),
]


@pytest.mark.parametrize(("spec", "temperature", "says"), OTHER_TEMPERATURES + CUT)
def test_rollout_logprobs_of_another_distribution(spec, temperature, says):
    loss = replace(CORRECTED, temperature=temperature)
    error = refuse(checks.check_samples, loss, [make_samples(rollout_logprob_spec=spec)])
    assert error.info.field == "samples.rollout_logprob_spec"
    assert says in error.info.value


@pytest.mark.parametrize(("spec", "temperature", "says"), OTHER_TEMPERATURES)
def test_another_temperature_is_refused_without_a_correction_too(spec, temperature, says):
    loss, samples = PolicyLoss(temperature=temperature), make_samples(rollout_logprob_spec=spec)
    error = refuse(checks.check_samples, loss, [samples])
    assert error.info.field == "samples.rollout_logprob_spec"
    assert says in error.info.value
    checks.check_samples(loss, [replace(samples, rollout_logprobs=None)])


@pytest.mark.parametrize("spec", [spec for spec, _, _ in CUT])
def test_without_a_correction_nothing_is_biased_by_tokens_left_out(spec):
    checks.check_samples(PolicyLoss(), [make_samples(rollout_logprob_spec=spec)])


def test_raw_logprobs_fit_temperature_one():
    raw = LogprobSpec(kind=LogprobKind.RAW)
    checks.check_samples(CORRECTED, [make_samples(rollout_logprob_spec=raw)])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["advantages", "old_logprobs", "rollout_logprobs"])
def test_a_number_that_is_none_is_named_with_its_sample(name, bad):
    values = make_samples().advantages.copy()
    values[5] = bad
    error = refuse(checks.check_joined, PolicyLoss(), make_samples(**{name: values}), 10, 0)
    assert error.info.sample_id == "b"
    assert error.info.field == f"samples.{name}"


def test_a_masked_nan_is_nobodys_business():
    values = make_samples().advantages.copy()
    values[[0, 3, 4]] = np.nan
    checks.check_joined(PolicyLoss(), make_samples(advantages=values), 10, 0)


def test_ids_lengths_and_masks():
    samples = make_samples()
    assert refuse(checks.check_joined, SftLoss(), samples, 9, 0).info.sample_id == "b"
    assert refuse(checks.check_joined, SftLoss(), samples, 10, 3).info.sample_id == "b"
    first = samples.action_mask.copy()
    first[3] = True
    wrong = make_samples(action_mask=first)
    assert refuse(checks.check_joined, SftLoss(), wrong, 10, 0).info.sample_id == "b"
    nothing = make_samples(action_mask=np.zeros(7, bool))
    assert "no token" in refuse(checks.check_joined, SftLoss(), nothing, 10, 0).message


def test_pairs():
    one = take(make_samples(), [0])
    assert "no pairs" in refuse(checks.check_joined, DpoLoss(), one, 10, 0).message
    margins = make_samples(margins=np.array([np.nan], np.float32))
    error = refuse(checks.check_joined, PairwiseLoss(), margins, 10, 0)
    assert (error.info.field, error.info.sample_id) == ("samples.margins", "a")
    too_many = make_samples(margins=np.zeros(2, np.float32))
    refuse(checks.check_joined, PairwiseLoss(), too_many, 10, 0)


def test_forward():
    sequences = make_samples().sequences
    values = ForwardRequest(chunk_id="c", sequences=sequences, output=ForwardOutput.VALUES)
    refuse(checks.check_forward, values, ForwardOutput.LOGPROBS)
    entropy = ForwardRequest(chunk_id="c", sequences=sequences, with_entropy=True)
    refuse(checks.check_forward, entropy, ForwardOutput.VALUES)
    checks.check_forward(entropy, ForwardOutput.LOGPROBS)


def test_join_and_take_are_inverse():
    a, b = (
        make_samples(margins=np.ones(1, np.float32)),
        make_samples(margins=np.zeros(1, np.float32)),
    )
    joined = join([a, b])
    assert joined.sequences.sample_ids == ("a", "b", "a", "b")
    second = take(joined, [2, 3])
    assert second.sequences.token_ids.tolist() == b.sequences.token_ids.tolist()
    assert second.margins.tolist() == [0.0]
    assert second.advantages.tolist() == b.advantages.tolist()
    swapped = take(joined, [1, 0])
    assert swapped.sequences.lengths.tolist() == [4, 3]
    assert swapped.sequences.token_ids.tolist() == [8, 9, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo"])
@pytest.mark.parametrize("corrected", [True, False])
def test_every_pair_of_distributions(kind, corrected):
    """Accepted are those in which both sides say softmax(logits / T) over all tokens, and no other.

    Without a correction a cut distribution is only logged, so it may be sent.
    """
    correction = MismatchCorrection(level="token") if corrected else None
    for form, sampled, top_p, top_k, temperature in itertools.product(
        LogprobKind, (0.7, 1.0), (0.9, 1.0), (-1, 50), (0.7, 1.0)
    ):
        spec = LogprobSpec(kind=form, temperature=sampled, top_p=top_p, top_k=top_k)
        loss = PolicyLoss(type=kind, temperature=temperature, mismatch_correction=correction)
        whole = (top_p, top_k) == (1.0, -1)
        same = sampled == temperature and (form is LogprobKind.PROCESSED or sampled == 1.0)
        samples = [make_samples(rollout_logprob_spec=spec)]
        if same and (whole or not corrected):
            checks.check_samples(loss, samples)
        else:
            refuse(checks.check_samples, loss, samples)

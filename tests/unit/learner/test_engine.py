"""One rank of the learner: what comes out does not depend on how it was cut or laid out."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from quartet_learner.samples import take

from quartet.errors import ConfigError, StateError
from quartet.types import (
    DpoLoss,
    KlLoss,
    MismatchCorrection,
    PairwiseLoss,
    PolicyLoss,
    ScheduleConfig,
    SequenceBatch,
    SftLoss,
    ValueLoss,
)
from quartet.types.requests import ForwardRequest

from .conftest import weights_of
from .steps import LENGTHS, logprobs_of, make_samples, make_sequences, step_of

FULL_LOSS = PolicyLoss(
    eps_clip_high=0.28,
    dual_clip=3.0,
    aggregation="seq-mean-token-mean",
    entropy_coef=0.01,
    kl_loss=KlLoss(coef=0.1, estimator="k3"),
    mismatch_correction=MismatchCorrection(level="token", mode="clip"),
    temperature=0.9,
)
LOSSES = {
    "policy": (FULL_LOSS, {}),
    "gspo": (PolicyLoss(type="gspo", aggregation="seq-mean-token-mean"), {}),
    "cispo": (
        PolicyLoss(
            type="cispo",
            aggregation="seq-mean-token-sum-norm",
            aggregation_length=12,
            mismatch_correction=MismatchCorrection(
                level="seq", gating="binary_kl", threshold_low=0.0, threshold_high=0.1
            ),
        ),
        {},
    ),
    "sft": (SftLoss(), {}),
    "ipo": (DpoLoss(ipo=True), {}),
    "dpo": (DpoLoss(nll_loss_coef=0.1), {}),
    "value": (ValueLoss(), {"head": "value"}),
    "pairwise": (PairwiseLoss(), {"head": "reward"}),
}


def train_once(engine, loss, samples, **limits):
    result = engine.train(step_of(loss, **limits), samples)
    return result, weights_of(engine)


def same_step(one, other, lr=1e-3):
    (a, weights_a), (b, weights_b) = one, other
    assert a.applied
    assert b.applied
    assert a.grad_norm == pytest.approx(b.grad_norm, rel=2e-6)
    assert a.metrics == pytest.approx(b.metrics, rel=1e-5, abs=2e-6)
    for name, weight in weights_a.items():
        # Adam divides by the gradient's size, so a gradient that is rounding noise moves by up to
        # lr in either direction; all others must agree.
        different = (weight - weights_b[name]).abs() > 1e-3 * lr
        assert different.float().mean() < 0.01, name


@pytest.mark.parametrize("name", LOSSES)
def test_the_cut_does_not_change_the_step(make_engine, name):
    loss, settings = LOSSES[name]
    samples = make_samples()
    whole = train_once(make_engine(**settings), loss, samples)
    assert whole[0].num_micro_batches == 1
    one_by_one = train_once(make_engine(**settings), loss, samples, micro_batch_size=1)
    assert one_by_one[0].num_micro_batches == (4 if name in ("dpo", "ipo", "pairwise") else 8)
    same_step(whole, one_by_one)
    shuffled = take(samples, [6, 7, 2, 3, 0, 1, 4, 5])
    cut = train_once(make_engine(**settings), loss, shuffled, max_tokens_per_micro_batch=26)
    same_step(whole, cut)


@pytest.mark.parametrize("name", ["policy", "value", "pairwise"])
@pytest.mark.parametrize(
    ("stage", "packed"), [(0, True), (1, False), (2, False), (2, True), (3, False), (3, True)]
)
def test_stage_and_layout_do_not_change_the_step(make_engine, name, stage, packed):
    loss, settings = LOSSES[name]
    samples = make_samples()
    plain = train_once(make_engine(**settings), loss, samples)
    other = make_engine(zero_stage=stage, packed=packed, **settings)
    same_step(plain, train_once(other, loss, samples, max_tokens_per_micro_batch=26))


def test_gradient_checkpointing_does_not_change_the_step(make_engine):
    samples = make_samples()
    plain = train_once(make_engine(), FULL_LOSS, samples)
    for reentrant in (False, True):
        engine = make_engine(
            gradient_checkpointing=True, gradient_checkpointing_reentrant=reentrant
        )
        assert engine.model.hf.is_gradient_checkpointing
        same_step(plain, train_once(engine, FULL_LOSS, samples, micro_batch_size=3))


def test_the_gradient_is_that_of_plain_torch(make_engine, tiny_model_dir):
    from transformers import AutoModelForCausalLM

    samples = make_samples()
    result = make_engine().train(step_of(SftLoss()), samples)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    losses = []
    for row, mask in zip(
        samples.sequences.rows(), samples.sequences.rows(samples.action_mask), strict=True
    ):
        ids = torch.tensor(row.tolist())
        log_p = model(ids[None]).logits[0, :-1].log_softmax(-1)
        losses.append(-log_p.gather(-1, ids[1:, None])[:, 0][torch.tensor(mask[1:])])
    loss = torch.cat(losses).mean()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    assert result.metrics["gpt_loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert result.grad_norm == pytest.approx(norm, rel=2e-6)


def test_at_step_zero_policy_rollout_and_reference_agree(make_engine):
    engine = make_engine()
    samples = make_samples()
    for temperature in (1.0, 0.7):
        logprobs = logprobs_of(engine, samples.sequences, temperature=temperature)
        fresh = replace(
            samples, old_logprobs=logprobs, ref_logprobs=logprobs, rollout_logprobs=logprobs
        )
        loss = PolicyLoss(temperature=temperature, kl_loss=KlLoss(coef=0.0))
        before = engine.train(replace(step_of(loss, micro_batch_size=3)), fresh).metrics
        assert before["ppo_ratio"] == pytest.approx(1, abs=1e-6)
        for name in ("kl", "ppo_kl", "logprobs_diff", "vllm_kl", "ppo_clip_ratio"):
            assert before[name] == pytest.approx(0, abs=1e-6), name


def test_training_learns(make_engine):
    engine = make_engine(lr=1e-2)
    samples = make_samples()
    losses = [
        engine.train(step_of(SftLoss(), number), samples).metrics["gpt_loss"] for number in range(8)
    ]
    assert losses[-1] < 0.5 * losses[0]
    assert engine.run.optimizer_steps == 8


def test_samples_without_trained_tokens_are_harmless(make_engine):
    """Wherever they stand: same gradient, same metrics, counted among the samples."""
    samples = make_samples()
    lengths = (4, *LENGTHS[:3], 6, *LENGTHS[3:], 1)
    padded = make_samples(lengths=lengths)
    empty = np.repeat([n in (0, 4, len(lengths) - 1) for n in range(len(lengths))], lengths)
    filled = {"action_mask": ~empty}
    for name in ("action_mask", "advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs"):
        array = getattr(padded, name).copy()
        array[empty] = False if name == "action_mask" else np.nan
        array[~empty] = getattr(samples, name)
        filled[name] = array
    tokens = padded.sequences.token_ids.copy()
    tokens[~empty] = samples.sequences.token_ids
    more = replace(padded, sequences=replace(padded.sequences, token_ids=tokens), **filled)
    clean = train_once(make_engine(), FULL_LOSS, samples)
    same_step(clean, train_once(make_engine(), FULL_LOSS, more, max_tokens_per_micro_batch=26))


@pytest.mark.parametrize("poison", [np.nan, -np.inf, np.inf])
def test_a_masked_nan_poisons_nothing(make_engine, poison):
    samples = make_samples()
    clean = make_engine().train(step_of(FULL_LOSS), samples)
    outside = ~samples.action_mask
    poisoned = {
        name: np.where(outside, np.float32(poison), getattr(samples, name))
        for name in ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs")
    }
    dirty = make_engine().train(step_of(FULL_LOSS), replace(samples, **poisoned))
    assert dirty.applied
    assert dirty.grad_norm == clean.grad_norm
    assert dirty.metrics == clean.metrics


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gradient_that_is_not_finite_changes_nothing(make_engine, stage, dtype):
    samples = make_samples()
    huge = replace(samples, advantages=np.full_like(samples.advantages, 3e38))
    clean = make_engine(zero_stage=stage, param_dtype=dtype)
    clean.train(step_of(), samples)
    engine = make_engine(zero_stage=stage, param_dtype=dtype)
    before = weights_of(engine)
    refused = engine.train(step_of(), huge)
    assert not refused.applied
    assert refused.optimizer_steps == 0
    assert not math.isfinite(refused.grad_norm)
    for name, weight in weights_of(engine).items():
        assert torch.equal(weight, before[name]), name
    # Optimizer and schedule did not move either: the next step is that of a fresh engine.
    assert engine.train(step_of(), samples).applied
    expected = weights_of(clean)
    for name, weight in weights_of(engine).items():
        assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_bf16_follows_fp32(make_engine, stage):
    samples = make_samples()
    exact = make_engine(lr=1e-2)
    half = make_engine(lr=1e-2, param_dtype="bfloat16", zero_stage=stage)
    for number in range(4):
        loss = step_of(SftLoss(), number, micro_batch_size=3)
        a, b = exact.train(loss, samples), half.train(loss, samples)
        assert b.metrics["gpt_loss"] == pytest.approx(a.metrics["gpt_loss"], rel=0.03)
        assert b.grad_norm == pytest.approx(a.grad_norm, rel=0.1)


def test_clipping_is_reported_before_and_done_after(make_engine):
    samples = make_samples()
    free, clipped = make_engine(max_norm=0.0), make_engine(max_norm=1e-9)
    a, b = free.train(step_of(SftLoss()), samples), clipped.train(step_of(SftLoss()), samples)
    assert a.grad_norm == pytest.approx(b.grad_norm)
    assert a.grad_norm > 0.1
    start = weights_of(make_engine())
    name = "model.embed_tokens.weight"
    moved_free = (weights_of(free)[name] - start[name]).abs().max()
    moved_clipped = (weights_of(clipped)[name] - start[name]).abs().max()
    assert moved_clipped < 0.2 * moved_free


def test_schedule_warms_up_and_ends_at_its_floor(make_engine):
    schedule = ScheduleConfig(
        name="cosine_with_min_lr", total_steps=10, warmup_ratio=0.15, min_lr_ratio=0.1
    )
    engine = make_engine(lr=1e-3, schedule=schedule)
    samples = make_samples()
    rates = [engine.train(step_of(SftLoss(), n), samples).lr for n in range(11)]
    assert rates[:3] == pytest.approx([0.0, 0.5e-3, 1e-3])
    assert rates[6] == pytest.approx(1e-3 * (0.1 + 0.9 * (1 + math.cos(math.pi / 2)) / 2))
    assert rates[10] == pytest.approx(1e-4)


def test_vectors_do_not_decay(make_engine):
    start = weights_of(make_engine(lr=0.0))
    engine = make_engine(lr=1e-2, weight_decay=0.5, max_norm=1e-9)
    engine.train(step_of(SftLoss()), make_samples())
    plain = make_engine(lr=1e-2, weight_decay=0.0, max_norm=1e-9)
    plain.train(step_of(SftLoss()), make_samples())
    for name, weight in weights_of(engine).items():
        undecayed = weights_of(plain)[name]
        if weight.ndim == 1:
            assert torch.equal(weight, undecayed), name
        else:
            decay = undecayed - 1e-2 * 0.5 * start[name]
            torch.testing.assert_close(weight, decay, rtol=1e-5, atol=1e-6)


def test_another_run_starts_from_the_model_as_loaded(make_engine):
    engine = make_engine(lr=1e-2)
    start = weights_of(engine)
    engine.train(step_of(SftLoss()), make_samples())
    spec = engine.run.spec
    again = engine.start_run(spec)
    assert (again.resumed, again.optimizer_steps) == (True, 1)
    fresh = engine.start_run(replace(spec, run_id="other"))
    assert (fresh.resumed, fresh.optimizer_steps) == (False, 0)
    for name, weight in weights_of(engine).items():
        assert torch.equal(weight, start[name]), name


def test_nothing_works_before_a_run(tiny_model_dir, group):
    from quartet_learner.engine import LearnerEngine
    from quartet_learner.settings import LearnerSettings

    engine = LearnerEngine(LearnerSettings(model_name_or_path=str(tiny_model_dir)), group)
    with pytest.raises(StateError, match="no run"):
        engine.train(step_of(), make_samples())
    with pytest.raises(StateError, match="no run"):
        engine.forward(ForwardRequest(chunk_id="c", sequences=make_sequences()))


def test_a_run_that_could_not_begin_is_named_to_the_one_before(make_engine):
    engine = make_engine()
    spec = engine.run.spec
    unknown = replace(spec, run_id="other", schedule=replace(spec.schedule, name="none"))
    with pytest.raises(ConfigError, match="schedule"):
        engine.start_run(unknown)
    with pytest.raises(StateError, match="no run is under way; run other was the last to be begun"):
        engine.train(step_of(), make_samples())


def test_forward_does_not_depend_on_company_or_layout(make_engine):
    sequences = make_sequences()
    padded, packed = make_engine(), make_engine(packed=True, zero_stage=3)
    together = padded.forward(ForwardRequest(chunk_id="c", sequences=sequences, with_entropy=True))
    for engine in (padded, packed):
        tight = engine.forward(
            ForwardRequest(
                chunk_id="c", sequences=sequences, with_entropy=True, max_tokens_per_micro_batch=13
            )
        )
        np.testing.assert_allclose(tight.output, together.output, atol=2e-5)
        np.testing.assert_allclose(tight.entropy, together.entropy, atol=2e-5)
    assert (together.output[sequences.offsets[:-1]] == 0).all()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_sleep_and_wake_change_nothing(make_engine, stage):
    samples = make_samples()
    awake, drowsy = make_engine(zero_stage=stage), make_engine(zero_stage=stage)
    for number in range(2):
        expected = awake.train(step_of(SftLoss(), number), samples)
        drowsy.sleep()
        drowsy.sleep()
        with pytest.raises(StateError, match="asleep"):
            drowsy.train(step_of(SftLoss(), number), samples)
        drowsy.wake()
        got = drowsy.train(step_of(SftLoss(), number), samples)
        assert (got.grad_norm, got.metrics) == (expected.grad_norm, expected.metrics)


def test_full_determinism_gives_the_same_bits(make_engine):
    samples = make_samples()

    def train() -> tuple:
        engine = make_engine(full_determinism=True, zero_stage=2)
        assert torch.are_deterministic_algorithms_enabled()
        results = [engine.train(step_of(FULL_LOSS, n), samples) for n in range(2)]
        return [(r.metrics, r.grad_norm) for r in results], weights_of(engine)

    try:
        (first, weights), (second, again) = train(), train()
    finally:
        torch.use_deterministic_algorithms(False)
    assert first == second
    assert all(torch.equal(weight, again[name]) for name, weight in weights.items())


def test_fp16_is_refused_where_it_cannot_train(make_engine):
    with pytest.raises(ConfigError) as caught:
        make_engine(param_dtype="float16")
    assert caught.value.info.field == "ds.param_dtype"


def test_one_token_sequences_have_no_logprob(make_engine):
    output = logprobs_of(make_engine(), SequenceBatch.of([[7], [8, 9]]))
    assert output[:2].tolist() == [0, 0]
    assert output[2] < 0

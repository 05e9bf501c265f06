"""Aggregation, KL, value, SFT, pairwise and DPO losses."""

from __future__ import annotations

import pytest
import torch
from quartet_learner.losses import (
    StepCounts,
    TokenBatch,
    dpo_loss,
    kl_estimate,
    kl_with_unbiased_gradient,
    pairwise_loss,
    sft_loss,
    token_weights,
    value_loss,
)

from quartet.types import DpoLoss, PairwiseLoss, ValueLoss

from .conftest import Padded, cases, load_vectors

AGGREGATIONS = {
    "openrlhf_token": "token-mean",
    "openrlhf_sample": "seq-mean-token-mean",
    "verl_token-mean": "token-mean",
    "verl_seq-mean-token-sum": "seq-mean-token-sum",
    "verl_seq-mean-token-mean": "seq-mean-token-mean",
    "verl_new_seq-mean-token-sum-norm": "seq-mean-token-sum-norm",
    "skyrl_token_mean": "token-mean",
    "skyrl_sequence_mean": "seq-mean-token-mean",
    "skyrl_seq_mean_token_sum_norm": "seq-mean-token-sum-norm",
}


NAMED_AGGREGATIONS = [p for p in cases("loss_aggregation") if p.id in AGGREGATIONS]


@pytest.mark.parametrize("case", NAMED_AGGREGATIONS)
def test_aggregation_vectors(case, close):
    padded = Padded(case["inputs"]["mask"])
    weights = token_weights(padded.batch(), padded.counts, AGGREGATIONS[case["id"]], length=6)
    close((weights * padded.pick(case["inputs"]["loss"])).sum(), case["expected"]["loss"])


@pytest.mark.parametrize("aggregation", sorted(set(AGGREGATIONS.values())))
def test_shards_add_up_to_the_whole(aggregation, close):
    inputs = load_vectors("loss_aggregation")["inputs"]
    whole = Padded(inputs["mask"])
    parts = 0.0
    for rows in ([0, 1], [2, 3, 4]):
        shard = Padded([inputs["mask"][row] for row in rows])
        weights = token_weights(shard.batch(), whole.counts, aggregation, length=6)
        parts += (weights * shard.pick([inputs["loss"][row] for row in rows])).sum()
    weights = token_weights(whole.batch(), whole.counts, aggregation, length=6)
    close(parts, (weights * whole.pick(inputs["loss"])).sum())


@pytest.mark.parametrize("case", cases("kl_estimators"))
def test_kl_vectors(case, close):
    logprobs = torch.tensor(case["inputs"]["log_probs"], requires_grad=True)
    kl = kl_estimate(
        logprobs,
        torch.tensor(case["inputs"]["ref_log_probs"]),
        case["params"]["estimator"],
        bounds="all",
    )
    if "kl" in case["expected"]:
        close(kl, case["expected"]["kl"], atol=2e-7)
    else:
        (grad,) = torch.autograd.grad(kl.sum(), logprobs)
        close(grad, case["expected"]["grad_wrt_log_probs"])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_unbiased_gradient_keeps_the_value(estimator, close):
    logprobs = torch.tensor([-30.0, -10, -1, 0.1, 1, 10, 30], requires_grad=True)
    zero = torch.zeros(7)
    kl = kl_estimate(logprobs, zero, estimator)
    unbiased = kl_with_unbiased_gradient(kl, logprobs, zero, zero)
    close(unbiased, kl)
    (grad,) = torch.autograd.grad(unbiased.sum(), logprobs)
    close(grad, [0, -0.000454, -0.367879, 0.110517, 2.718282, 100, 300], atol=1e-6)


@pytest.mark.parametrize("case", cases("value_loss"))
@pytest.mark.parametrize("aggregation", ["token", "sample"])
def test_value_vectors(case, aggregation, close):
    inputs = case["inputs"]
    padded = Padded(inputs["mask"])
    spec = ValueLoss(
        value_clip=case["params"]["clip_eps"],
        aggregation="token-mean" if aggregation == "token" else "seq-mean-token-mean",
    )
    batch = padded.batch(returns=inputs["returns"], old_values=inputs["old_values"])
    values = padded.pick(inputs["values"])
    out = value_loss(spec, batch, values, padded.counts)
    close(out.loss, case["expected"][f"loss_{aggregation}"])
    close(out.metrics["values"], values.mean())


def test_value_loss_gradient_is_silent_beyond_the_clip(close):
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    batch = TokenBatch(
        segments=torch.zeros(3, dtype=torch.long),
        num_sequences=1,
        returns=torch.tensor([0.0, 2.0, 4.0]),
        old_values=torch.tensor([0.5, 2.5, 0.0]),
    )
    out = value_loss(ValueLoss(value_clip=0.5), batch, values, StepCounts(tokens=3, sequences=1))
    close(out.loss, 2.208333, atol=1e-6)
    (grad,) = torch.autograd.grad(out.loss, values)
    assert grad[2] == 0


def test_sft_vectors(close):
    data = load_vectors("sft_and_logprobs")
    expected = {case["id"]: case["expected"] for case in data["cases"]}
    padded = Padded(data["inputs"]["mask"])
    logprobs = padded.pick(expected["openrlhf_logprobs_T1.0"]["log_probs"]).requires_grad_()
    out = sft_loss(logprobs, padded.counts)
    close(out.loss, expected["openrlhf_sft_token"]["loss"])
    (grad,) = torch.autograd.grad(out.loss, logprobs)
    close(grad, torch.full_like(grad, -1 / 5))


@pytest.mark.parametrize("case", cases("reward_model_loss"))
def test_pairwise_vectors(case, close):
    inputs = case["inputs"]
    rewards = torch.tensor([inputs["chosen"], inputs["rejected"]]).T.flatten()
    margins = torch.tensor(inputs["margin"]) if case["params"].get("margin") else None
    kind = "logexp" if "logexp" in case["id"] else "sigmoid"
    counts = StepCounts(tokens=8, sequences=8, pairs=4)
    out = pairwise_loss(PairwiseLoss(type=kind), rewards, margins, counts)
    close(out.loss, case["expected"]["loss"])
    close(out.metrics["acc"], 0.5)
    close(out.metrics["chosen_reward"], 1.1)


def test_logexp_does_not_overflow(close):
    counts = StepCounts(tokens=2, sequences=2, pairs=1)
    rewards = torch.tensor([0.0, 1000.0], requires_grad=True)
    out = pairwise_loss(PairwiseLoss(type="logexp"), rewards, None, counts)
    close(out.loss, 1000.0)
    (grad,) = torch.autograd.grad(out.loss, rewards)
    close(grad, [-1.0, 1.0])


@pytest.mark.parametrize("case", cases("dpo"))
def test_dpo_vectors(case, close):
    inputs, params, expected = case["inputs"], case["params"], case["expected"]
    policy = torch.tensor([inputs["policy_chosen"], inputs["policy_rejected"]]).T.flatten()
    ref = torch.tensor([inputs["ref_chosen"], inputs["ref_rejected"]]).T.flatten()
    # Two tokens a sequence, half of the log-probability each: sums must be as given.
    logprobs = (policy / 2).repeat_interleave(2).requires_grad_()
    batch = TokenBatch(
        segments=torch.arange(6).repeat_interleave(2),
        num_sequences=6,
        ref_logprobs=(ref / 2).repeat_interleave(2),
    )
    spec = DpoLoss(
        beta=params["beta"],
        ipo=params.get("ipo", False),
        ipo_sum=True,
        label_smoothing=params.get("label_smoothing", 0.0),
    )
    out = dpo_loss(spec, batch, logprobs, StepCounts(tokens=12, sequences=6, pairs=3))
    close(out.loss, expected["loss"])
    (grad,) = torch.autograd.grad(out.loss, logprobs)
    close(grad[0::4], expected["grad_chosen"], rtol=2e-5)
    close(grad[2::4], expected["grad_rejected"], rtol=2e-5)
    close(out.metrics["chosen_reward"], sum(expected["chosen_rewards"]) / 3)
    close(out.metrics["reject_reward"], sum(expected["rejected_rewards"]) / 3)


def test_dpo_nll_term_is_the_mean_over_the_chosen_answers(close):
    logprobs = torch.tensor([-1.0, -3.0, -9.0, -0.5, -9.0])
    batch = TokenBatch(
        segments=torch.tensor([0, 0, 1, 2, 3]), num_sequences=4, ref_logprobs=logprobs
    )
    counts = StepCounts(tokens=5, sequences=4, pairs=2)
    plain = dpo_loss(DpoLoss(), batch, logprobs, counts)
    out = dpo_loss(DpoLoss(nll_loss_coef=0.2), batch, logprobs, counts)
    close(out.metrics["nll_loss"], (2.0 + 0.5) / 2)
    close(out.loss - plain.loss, 0.2 * 1.25)

"""Policy losses against vectors made by public implementations, and against written-out numbers."""

from __future__ import annotations

import math

import pytest
import torch
from quartet_learner.losses import StepCounts, TokenBatch, policy_loss

from quartet.types import KlLoss, MismatchCorrection, PolicyLoss

from .conftest import Padded, cases


def run(case, spec, **extra):
    inputs = case["inputs"]
    padded = Padded(inputs["mask"])
    batch = padded.batch(
        advantages=inputs["advantages"], old_logprobs=inputs["old_log_probs"], **extra
    )
    logprobs = padded.pick(inputs["log_probs"]).requires_grad_()
    out = policy_loss(spec, batch, logprobs, None, padded.counts)
    (grad,) = torch.autograd.grad(out.loss, logprobs)
    return out, padded.spread(grad)


@pytest.mark.parametrize("case", cases("policy_loss", "openrlhf_"))
def test_policy_loss_vectors(case, close):
    params, expected = case["params"], case["expected"]
    per_sequence = not params.get("token_level_loss", True)
    spec = PolicyLoss(
        type=params.get("policy_loss_type", "ppo"),
        eps_clip_low=params["clip_eps_low"],
        eps_clip_high=params["clip_eps_high"],
        dual_clip=params.get("dual_clip"),
        aggregation="seq-mean-token-mean"
        if per_sequence or params.get("policy_loss_type") == "gspo"
        else "token-mean",
    )
    out, grad = run(case, spec)
    close(out.loss, expected["loss"])
    close(grad, expected["grad"])
    close(out.metrics["policy_loss"], expected["loss"])
    close(out.metrics["ppo_clip_ratio"], expected["clip_ratio"])
    close(out.metrics["ppo_kl"], expected["ppo_kl"])


CORRECTIONS = {
    "tis": {"level": "token", "mode": "clip"},
    "icepop": {"level": "token", "mode": "mask"},
    "seq-mask-tis": {"level": "seq", "mode": "mask"},
}


@pytest.mark.parametrize("case", cases("is_correction"))
def test_correction_vectors(case, close):
    params, expected = case["params"], case["expected"]
    gspo = params.get("policy_loss_type") == "gspo"
    low, high = params.get("thresholds", (0.5, 5.0))
    spec = PolicyLoss(
        type="gspo" if gspo else "ppo",
        eps_clip_low=params["clip"],
        eps_clip_high=params["clip"],
        aggregation="seq-mean-token-mean" if gspo else "token-mean",
        mismatch_correction=MismatchCorrection(
            **CORRECTIONS.get(params.get("type"), {"level": "token"}),
            threshold_low=low,
            threshold_high=high,
        ),
    )
    out, grad = run(case, spec, rollout_logprobs=case["inputs"]["rollout_log_probs"])
    close(out.loss, expected["loss"])
    close(grad, expected["grad"])
    if "vllm_kl" in expected:
        close(out.metrics["vllm_kl"], expected["vllm_kl"])


MASK = [[1.0, 1, 1], [1, 1, 0]]
ADVANTAGES = [[1.0, 1, -1], [-1, -1, 2]]
OLD = [[-0.5, -1, -2], [-0.1, -3, 0]]
ROLLOUT = [[-0.6, -1.5, -1.9], [-0.1, -2, 0]]
STEP = [[0.05, -0.05, 0.1], [0.3, -0.3, 0]]
GRADIENT_TOKEN = [[-0.232367, 0, 0.2], [0.269972, 0, 0]]


@pytest.mark.parametrize(
    ("gating", "level", "high", "loss", "outside", "gradient"),
    [
        ("binary_kl", "token", 0.03, 0.237605, 0.4, GRADIENT_TOKEN),
        ("binary_kl", "seq", 0.03, -0.017197, 0, [[-0.232367, -0.313662, 0.2], [0.269972, 0, 0]]),
        ("tv", "token", 0.06, 0.237605, 0.4, GRADIENT_TOKEN),
        ("tv", "seq", 0.06, 0.328832, 0.5, [[0, 0, 0], [0.269972, 0, 0]]),
    ],
)
def test_divergence_gates(close, gating, level, high, loss, outside, gradient):
    padded = Padded(MASK)
    batch = padded.batch(advantages=ADVANTAGES, old_logprobs=OLD, rollout_logprobs=ROLLOUT)
    logprobs = (padded.pick(OLD) + padded.pick(STEP)).requires_grad_()
    spec = PolicyLoss(
        mismatch_correction=MismatchCorrection(
            level=level, gating=gating, threshold_low=0.0, threshold_high=high
        )
    )
    out = policy_loss(spec, batch, logprobs, None, padded.counts)
    (grad,) = torch.autograd.grad(out.loss, logprobs)
    close(out.loss, loss, atol=2e-6)
    close(padded.spread(grad), gradient, atol=2e-6)
    close(out.metrics["is_filter_ratio"], outside)
    close(out.metrics["vllm_kl"], 0.1, atol=1e-6)


@pytest.mark.parametrize("level", ["token", "seq"])
@pytest.mark.parametrize("gating", ["binary_kl", "tv"])
def test_no_token_on_which_both_engines_agree_is_left_out(level, gating):
    """In fp32 the divergence of probabilities that differ by rounding comes out below 0."""
    generator = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(500, generator=generator)
    batch = TokenBatch(
        segments=torch.arange(500) // 2,
        num_sequences=250,
        advantages=torch.ones(500),
        old_logprobs=old,
        rollout_logprobs=(old + 1e-6 * torch.randn(500, generator=generator)).clamp(max=0),
    )
    correction = MismatchCorrection(
        level=level, gating=gating, threshold_low=0.0, threshold_high=0.003
    )
    counts = StepCounts(tokens=500, sequences=250)
    out = policy_loss(PolicyLoss(mismatch_correction=correction), batch, old, None, counts)
    assert out.metrics["is_filter_ratio"] == 0
    assert out.loss.item() == pytest.approx(-1.0, rel=1e-5)


def test_the_statistic_of_a_sequence_is_not_bounded_token_by_token():
    """One of ten log-ratios is -50: their mean is -5, and not what is left of it within +-20."""
    rollout = torch.zeros(10).index_fill(0, torch.tensor([3]), 50.0)
    batch = TokenBatch(
        segments=torch.zeros(10, dtype=torch.long),
        num_sequences=1,
        advantages=torch.ones(10),
        old_logprobs=torch.zeros(10),
        rollout_logprobs=rollout,
    )
    counts = StepCounts(tokens=10, sequences=1)
    for low, outside in ((math.exp(-5.1), 0.0), (math.exp(-4.9), 1.0)):
        spec = MismatchCorrection(level="seq", threshold_low=low, threshold_high=5.0)
        out = policy_loss(
            PolicyLoss(mismatch_correction=spec), batch, torch.zeros(10), None, counts
        )
        assert out.metrics["is_filter_ratio"] == outside


def test_a_sequence_without_tokens_is_not_counted_as_filtered(close):
    padded = Padded([[1.0, 1], [0, 0]])
    batch = padded.batch(
        advantages=[1.0, 1.0], old_logprobs=[[-1.0, -1], [0, 0]], rollout_logprobs=[-1.0, -1.0]
    )
    spec = PolicyLoss(mismatch_correction=MismatchCorrection(level="seq"))
    out = policy_loss(spec, batch, padded.pick([[-1.0, -1], [0, 0]]), None, padded.counts)
    close(out.metrics["is_filter_ratio"], 0.0)


def test_cispo_clips_the_weight_and_keeps_every_gradient(close):
    ratio = torch.tensor([0.5, 1.1, 3.0])
    old = torch.tensor([-1.0, -1.0, -1.0])
    advantages = torch.tensor([1.0, -2.0, 0.5])
    batch = TokenBatch(
        segments=torch.zeros(3, dtype=torch.long),
        num_sequences=1,
        advantages=advantages,
        old_logprobs=old,
    )
    logprobs = (old + ratio.log()).requires_grad_()
    out = policy_loss(
        PolicyLoss(type="cispo", eps_clip_low=0.2, eps_clip_high=0.28),
        batch,
        logprobs,
        None,
        StepCounts(tokens=3, sequences=1),
    )
    (grad,) = torch.autograd.grad(out.loss, logprobs)
    weights = torch.tensor([0.8, 1.1, 1.28])
    close(grad, -weights * advantages / 3)
    close(out.loss, (-weights * advantages * logprobs.detach()).mean())
    close(out.metrics["ppo_clip_ratio"], 2 / 3)


def test_on_policy_everything_is_at_its_fixed_point(close):
    logprobs = torch.tensor([-0.3, -2.0, -0.7], requires_grad=True)
    batch = TokenBatch(
        segments=torch.tensor([0, 0, 1]),
        num_sequences=2,
        advantages=torch.tensor([1.0, 1.0, -1.0]),
        old_logprobs=logprobs.detach(),
        ref_logprobs=logprobs.detach(),
        rollout_logprobs=logprobs.detach(),
    )
    spec = PolicyLoss(
        kl_loss=KlLoss(coef=0.1, estimator="k3"),
        mismatch_correction=MismatchCorrection(level="token", mode="clip"),
    )
    out = policy_loss(spec, batch, logprobs, None, StepCounts(tokens=3, sequences=2))
    zero = ("ppo_kl", "kl", "logprobs_diff", "vllm_kl", "ppo_clip_ratio", "is_filter_ratio")
    for name in zero:
        close(out.metrics[name], 0.0)
    close(out.metrics["ppo_ratio"], 1.0)
    close(out.loss, -1 / 3)


def test_kl_and_entropy_terms_enter_with_their_coefficients(close):
    logprobs = torch.tensor([-0.3, -2.0], requires_grad=True)
    entropy = torch.tensor([1.0, 3.0], requires_grad=True)
    batch = TokenBatch(
        segments=torch.tensor([0, 0]),
        num_sequences=1,
        advantages=torch.zeros(2),
        old_logprobs=logprobs.detach(),
        ref_logprobs=torch.tensor([-0.4, -1.7]),
    )
    spec = PolicyLoss(kl_loss=KlLoss(coef=0.5, estimator="k2"), entropy_coef=0.01)
    out = policy_loss(spec, batch, logprobs, entropy, StepCounts(tokens=2, sequences=1))
    close(out.loss, 0.5 * (0.1**2 / 2 + 0.3**2 / 2) / 2 - 0.01 * 2.0)
    grads = torch.autograd.grad(out.loss, (logprobs, entropy))
    close(grads[0], [0.5 * 0.1 / 2, -0.5 * 0.3 / 2], rtol=1e-5)
    close(grads[1], [-0.005, -0.005])
    close(out.metrics["entropy_loss"], 2.0)


def test_an_entropy_that_is_only_logged_gives_no_gradient():
    logprobs = torch.tensor([-0.3], requires_grad=True)
    entropy = torch.tensor([1.0], requires_grad=True)
    batch = TokenBatch(
        segments=torch.tensor([0]),
        num_sequences=1,
        advantages=torch.ones(1),
        old_logprobs=logprobs.detach(),
    )
    out = policy_loss(
        PolicyLoss(entropy_coef=0.0), batch, logprobs, entropy, StepCounts(tokens=1, sequences=1)
    )
    assert torch.autograd.grad(out.loss, entropy, allow_unused=True) == (None,)


def test_a_huge_log_ratio_stays_finite():
    logprobs = torch.tensor([0.0], requires_grad=True)
    batch = TokenBatch(
        segments=torch.tensor([0]),
        num_sequences=1,
        advantages=-torch.ones(1),
        old_logprobs=torch.tensor([-200.0]),
    )
    out = policy_loss(PolicyLoss(), batch, logprobs, None, StepCounts(tokens=1, sequences=1))
    assert out.loss.item() == pytest.approx(math.exp(20), rel=1e-5)


def test_a_micro_batch_without_tokens_adds_nothing():
    logprobs = torch.zeros(0, requires_grad=True)
    batch = TokenBatch(
        segments=torch.zeros(0, dtype=torch.long),
        num_sequences=1,
        advantages=torch.zeros(0),
        old_logprobs=torch.zeros(0),
    )
    out = policy_loss(PolicyLoss(), batch, logprobs, None, StepCounts(tokens=5, sequences=2))
    assert out.loss.item() == 0.0
    assert all(value.item() == 0.0 for value in out.metrics.values())
    out.loss.backward()

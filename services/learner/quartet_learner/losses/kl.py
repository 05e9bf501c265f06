"""Estimators of KL(policy || ref) from log-probabilities of sampled tokens.

See John Schulman, "Approximating KL divergence" (http://joschu.net/blog/kl-approx.html).
"""

from __future__ import annotations

from typing import Literal

import torch

from quartet_learner.losses.base import MAX_LOG_RATIO, Tensor

Bounds = Literal["k3", "all", "none"]

MAX_KL = 10.0
"""Where values are bounded: k3 grows exponentially, so one token could rule the mean."""
K3_REACHES_MAX = (-2.61086864, 10.99998330)
"""The d between which k3 is below MAX_KL."""
MAX_IMPORTANCE_WEIGHT = 10.0


def kl_estimate(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    estimator: Literal["k1", "k2", "k3"],
    *,
    bounds: Bounds = "k3",
) -> Tensor:
    """[M] estimates from d = logprobs - ref_logprobs.

    k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d. As a loss k1 has gradient 1 whatever d is, which
    is 0 in expectation; k2 has the gradient of the KL; k3 is biased.

    Args:
        logprobs: [M] of the policy, with gradient.
        ref_logprobs: [M] of the reference.
        estimator: k1, k2 or k3.
        bounds: "k3": values of k3 are kept within 10, and beyond the gradient stays what it is
            there. "all": those of every estimator, with gradient 0 beyond, as in OpenRLHF.
            "none": as they are, for metrics.
    """
    d = logprobs - ref_logprobs
    if estimator == "k1":
        kl = d
    elif estimator == "k2":
        kl = d.square() / 2
    elif bounds == "k3":
        return _bounded_k3(d)
    else:
        kl = _k3(d.clamp(min=-MAX_LOG_RATIO))
    return kl.clamp(-MAX_KL, MAX_KL) if bounds == "all" else kl


def _k3(d: Tensor) -> Tensor:
    # expm1 keeps the digits of a small d, which exp(-d) - 1 would lose in fp32.
    return torch.expm1(-d) + d


def _bounded_k3(d: Tensor) -> Tensor:
    """Values up to MAX_KL; beyond, the gradient stays what it is where that is reached.

    A plain clamp has gradient 0 there, so a policy that has drifted far would not be pulled back.
    """
    kept = d.detach().clamp(*K3_REACHES_MAX)
    slope = -torch.expm1(-kept)
    return _k3(kept).clamp(max=MAX_KL) + slope * (d - d.detach())


def kl_with_unbiased_gradient(
    kl: Tensor, logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor
) -> Tensor:
    """The values of `kl` with the gradient of w * d^2 / 2.

    w = min(exp(logprobs - old_logprobs), 10), held constant, makes up for tokens that were
    sampled by the old policy; the gradient w * d is then that of the reverse KL in expectation.
    """
    log_ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    weight = log_ratio.exp().clamp(max=MAX_IMPORTANCE_WEIGHT).detach()
    surrogate = weight * (logprobs - ref_logprobs).square() / 2
    return kl.detach() + surrogate - surrogate.detach()

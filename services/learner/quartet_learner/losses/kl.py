"""Estimators of KL(policy || ref) from log-probabilities of sampled tokens.

See John Schulman, "Approximating KL divergence" (http://joschu.net/blog/kl-approx.html).
"""

from __future__ import annotations

from typing import Literal

import torch

from quartet_learner.losses.base import MAX_LOG_RATIO, Tensor

MAX_KL = 10.0
"""In a loss values are kept within +-10, so that one token cannot rule the mean."""
BORDERS = {"k1": (-10.0, 10.0), "k2": (-(20.0**0.5), 20.0**0.5), "k3": (-2.6108, 11.0)}
"""The d where each estimator reaches +-MAX_KL."""
MAX_IMPORTANCE_WEIGHT = 10.0


def kl_estimate(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    estimator: Literal["k1", "k2", "k3"],
    *,
    bounded: bool = True,
) -> Tensor:
    """[M] estimates from d = logprobs - ref_logprobs, kept within +-10 if `bounded`.

    k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d. As a loss k1 has gradient 1 whatever d is, which
    is 0 in expectation; k2 has the gradient of the KL; k3 is biased.
    """
    d = logprobs - ref_logprobs
    if estimator == "k1":
        kl = d
    elif estimator == "k2":
        kl = d.square() / 2
    else:
        kept = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        kl = (-kept).exp() - 1 + kept
    return _bounded(kl, d, estimator) if bounded else kl


def _bounded(kl: Tensor, d: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Values kept within +-MAX_KL; beyond, the gradient stays what it is where that is reached.

    A plain clamp has gradient 0 there, so a policy that has drifted far would not be pulled back.
    """
    low, high = BORDERS[estimator]
    kept = d.detach().clamp(low, high)
    if estimator == "k1":
        slope = torch.ones_like(kept)
    else:
        slope = kept if estimator == "k2" else -torch.expm1(-kept)
    return kl.detach().clamp(-MAX_KL, MAX_KL) + slope * (d - d.detach())


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

"""How far the policy is from the reference: estimators of each token's KL, and controllers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from quartet.algorithms.ragged import Float

KlEstimator = Literal["k1", "k2", "k3"]
KlBounds = Literal["k3", "all", "none"]

MAX_KL = 10.0
"""Bound of a token's estimate, where it is bounded."""
MAX_LOG_RATIO = 20.0
"""Bound of the log-ratio inside the exponential of k3."""
MAX_CHANGE = 0.2
"""Most that the adaptive controller reacts to a relative error."""


def approx_kl(
    logprobs: NDArray[np.floating],
    ref_logprobs: NDArray[np.floating],
    estimator: KlEstimator = "k1",
    *,
    bounds: KlBounds = "k3",
) -> Float:
    """Estimate KL(policy || reference) token by token from one sample.

    With d = logprob - ref_logprob: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d
    (http://joschu.net/blog/kl-approx.html).

    Args:
        logprobs: Log-probabilities of the policy, any shape.
        ref_logprobs: Those of the reference, same shape.
        estimator: k1, k2 or k3.
        bounds: Which estimators are kept within +-10. k3 grows exponentially, so one token could
            outweigh a whole answer; "all" is OpenRLHF's rule; "none" reports the estimate itself.

    Raises:
        ValueError: the estimator is unknown.
    """
    difference = np.asarray(logprobs, np.float64) - np.asarray(ref_logprobs, np.float64)
    if estimator == "k1":
        kl = difference
    elif estimator == "k2":
        kl = difference**2 / 2.0
    elif estimator == "k3":
        bounded = np.maximum(difference, -MAX_LOG_RATIO)
        kl = np.expm1(-bounded) + bounded
    else:
        raise ValueError(f"KL estimator {estimator!r} is unknown; there are k1, k2 and k3")
    return np.clip(kl, -MAX_KL, MAX_KL) if bounds in (estimator, "all") else kl


class KlController(Protocol):
    """Owner of the weight of the KL penalty."""

    @property
    def coef(self) -> float:
        """The weight now: finite, not negative."""
        ...

    def update(self, kl: float, num_samples: int) -> None:
        """Take note of a step's mean KL per token and of its samples."""
        ...

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint must keep."""
        ...

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from a checkpoint."""
        ...


class FixedKlController:
    """The same weight for ever."""

    def __init__(self, coef: float) -> None:
        """Take a finite weight, not negative."""
        self._coef = _valid_coef(coef)

    @property
    def coef(self) -> float:
        """The weight."""
        return self._coef

    def update(self, kl: float, num_samples: int) -> None:
        """Check the numbers; the weight stays."""
        _check_update(kl, num_samples)

    def state_dict(self) -> dict[str, float]:
        """The weight."""
        return {"coef": self._coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Keep the weight of the flag: there is nothing to remember, and the flag may be new."""
        _valid_coef(state["coef"])


class AdaptiveKlController:
    """Steers the KL towards a target (arXiv:1909.08593, section 2.2).

    error = clip(kl / target - 1, -0.2, 0.2);  coef := coef * (1 + error * num_samples / horizon),
    the factor bounded to [0.5, 2] so that a step of very many samples cannot turn the sign.
    """

    def __init__(self, init_coef: float, *, target: float, horizon: float) -> None:
        """Start at `init_coef`.

        Args:
            init_coef: First weight, above 0: a weight of 0 would stay 0.
            target: KL per token to steer to, above 0.
            horizon: Samples over which a full error changes the weight by 20 %, above 0.

        Raises:
            ValueError: naming the number that is out of range.
        """
        for name, value in (("init_coef", init_coef), ("target", target), ("horizon", horizon)):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"KL {name} is {value}; an adaptive controller needs it above 0")
        self._coef = init_coef
        self._target = target
        self._horizon = horizon

    @property
    def coef(self) -> float:
        """The weight now."""
        return self._coef

    def update(self, kl: float, num_samples: int) -> None:
        """Steer by one step.

        Raises:
            ValueError: the KL is not finite; the weight then stays as it is.
        """
        _check_update(kl, num_samples)
        error = min(max(kl / self._target - 1.0, -MAX_CHANGE), MAX_CHANGE)
        factor = 1.0 + error * num_samples / self._horizon
        self._coef *= min(max(factor, 0.5), 2.0)

    def state_dict(self) -> dict[str, float]:
        """The weight: target and horizon are flags."""
        return {"coef": self._coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on with the saved weight."""
        self._coef = _valid_coef(state["coef"])


def make_kl_controller(
    init_coef: float, *, target: float | None = None, horizon: float = 10000
) -> KlController:
    """An adaptive controller when there is a target, else a fixed one."""
    if target is None:
        return FixedKlController(init_coef)
    return AdaptiveKlController(init_coef, target=target, horizon=horizon)


def _valid_coef(coef: float) -> float:
    if not (math.isfinite(coef) and coef >= 0):
        raise ValueError(f"KL coef is {coef}; it must be finite and not negative")
    return float(coef)


def _check_update(kl: float, num_samples: int) -> None:
    if not math.isfinite(kl):
        raise ValueError(f"the KL of this step is {kl}; the KL coefficient was left as it is")
    if num_samples < 0:
        raise ValueError(f"num_samples is {num_samples}; it must not be negative")

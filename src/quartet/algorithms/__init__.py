"""The mathematics between rewards and training, in numpy: no torch, no network, no state but KL's.

Every formula has expected numbers in `tests/vectors`, and a row in `docs/numerics.md`.
"""

from quartet.algorithms.advantages import (
    ESTIMATORS,
    AdvantageInputs,
    Advantages,
    AdvantageSettings,
    Estimator,
    compute_advantages,
)
from quartet.algorithms.balance import karmarkar_karp
from quartet.algorithms.filters import FilterVerdict, GroupFilter
from quartet.algorithms.groups import GroupStats, group_stats
from quartet.algorithms.kl import (
    AdaptiveKlController,
    FixedKlController,
    KlBounds,
    KlController,
    KlEstimator,
    approx_kl,
    make_kl_controller,
)
from quartet.algorithms.passes import pass_at_k
from quartet.algorithms.ragged import last_action, row_means, row_sums
from quartet.algorithms.returns import Spans, discounted_returns, gae
from quartet.algorithms.shaping import (
    clip_rewards,
    overlong_penalty,
    stop_properly_penalty,
    token_rewards,
)
from quartet.algorithms.whitening import whiten

__all__ = [
    "ESTIMATORS",
    "AdaptiveKlController",
    "AdvantageInputs",
    "AdvantageSettings",
    "Advantages",
    "Estimator",
    "FilterVerdict",
    "FixedKlController",
    "GroupFilter",
    "GroupStats",
    "KlBounds",
    "KlController",
    "KlEstimator",
    "Spans",
    "approx_kl",
    "clip_rewards",
    "compute_advantages",
    "discounted_returns",
    "gae",
    "group_stats",
    "karmarkar_karp",
    "last_action",
    "make_kl_controller",
    "overlong_penalty",
    "pass_at_k",
    "row_means",
    "row_sums",
    "stop_properly_penalty",
    "token_rewards",
    "whiten",
]

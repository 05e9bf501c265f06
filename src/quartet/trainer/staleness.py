"""How old the weights were that sampled a token, counted in versions of the policy.

A version is a push. A token that version 7 sampled and that is trained when the rollout services
hold version 9 is 2 versions old.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quartet.trainer.experience import Sample
from quartet.trainer.metrics import Metrics

STALE = "stale"
"""Why a sample older than allowed is not trained on, in ledger and metrics."""


def capacity(
    *,
    max_concurrent: int,
    running: int,
    max_staleness: int,
    version: int,
    batch_size: int,
    accepted: int,
) -> int:
    """How many more may be generated so that none is too old when its turn to be trained comes.

    The rule of AReaL (arXiv:2505.24298, section 5.1): samples are trained in order, `batch_size`
    of them a version, so the one numbered i (from 0) has its turn at version i // batch_size.

    Args:
        max_concurrent: Most that may run at once.
        running: Those that are being generated.
        max_staleness: Versions that may lie between generation and training.
        version: Versions so far; those behind a checkpoint count too.
        batch_size: Accepted ones that make a version.
        accepted: All that were accepted so far, trained or not. After a checkpoint of version v
            these are v * batch_size, or a burst of stale samples would follow.

    Returns:
        The number; below 1 means to wait.
    """
    room = (max_staleness + version + 1) * batch_size - (accepted + running)
    return min(max_concurrent - running, room)


def token_ages(sample: Sample, policy_version: int) -> NDArray[np.int64]:
    """[T] of each token of the completion: versions between its weights and `policy_version`."""
    ages = [
        np.full(span.end - span.start, policy_version - span.policy_version, np.int64)
        for span in sample.versions
    ]
    return np.concatenate(ages) if ages else np.zeros(0, np.int64)


def staleness_metrics(samples: Sequence[Sample], policy_version: int) -> Metrics:
    """Ages of all tokens that are about to be trained, by version `policy_version`."""
    if not samples:
        return {}
    ages = np.concatenate([token_ages(sample, policy_version) for sample in samples])
    mixed = [s.first_policy_version != s.last_policy_version for s in samples]
    return {
        "staleness/mean": float(ages.mean(dtype=np.float64)) if ages.size else 0.0,
        "staleness/max": float(ages.max(initial=0)),
        "staleness/mixed_rate": float(np.mean(mixed)),
    }


def is_stale(sample: Sample, policy_version: int, *, max_staleness: int) -> bool:
    """Whether a token of the sample is older than allowed."""
    return policy_version - sample.first_policy_version > max_staleness

"""Normalisation of advantages over all action tokens of a rollout batch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quartet.algorithms.ragged import Bool, Float

MIN_VARIANCE = 1e-8
"""Variance below which values are no longer blown up."""


def whiten(values: NDArray[np.floating], mask: Bool, *, scale: bool = True) -> Float:
    """(x - mean) * rsqrt(max(var, 1e-8)) over the tokens under `mask`; 0 elsewhere.

    The variance is biased (divided by n). The whole batch is one population: the result does not
    depend on how it is later cut into micro-batches.

    Args:
        values: [N] numbers; ignored where mask is 0, NaN included.
        mask: [N] action tokens.
        scale: False subtracts the mean and keeps the scale.
    """
    selected = np.asarray(values, dtype=np.float64)[mask]
    result = np.zeros(len(mask))
    # Equal values: exactly 0, whatever their mean was rounded to.
    if selected.size == 0 or selected.max() == selected.min():
        return result
    centred = selected - selected.mean()
    if scale:
        centred = centred / np.sqrt(max(float(np.mean(centred**2)), MIN_VARIANCE))
    result[mask] = centred
    return result

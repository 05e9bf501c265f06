"""Returns and generalised advantages, over ragged sequences with observation spans.

An observation span is a run of tokens between two actions that the policy did not choose: what a
tool or an environment said. Two rules exist for it.

* "carry": time counts the policy's own tokens. The token before a span is followed by the token
  after it: no discount is lost on what the policy did not choose, and V(next) is the value at the
  next action.
* "decay": the incumbent's rule. A span's tokens are states of value 0 and reward 0, each costing
  one factor of gamma * lambda.

Without such spans both rules give the same numbers.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from quartet.algorithms.ragged import Bool, Float, Grid

Spans = Literal["carry", "decay"]


def gae(
    rewards: Float,
    values: NDArray[np.floating],
    mask: Bool,
    lengths: NDArray[np.integer],
    *,
    gamma: float,
    lam: float,
    spans: Spans = "carry",
) -> tuple[Float, Float]:
    """Generalised advantage estimation (arXiv:1506.02438).

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lambda A_{t+1};  R_t = A_t + V_t,
    with V = 0 after the last action.

    Args:
        rewards: [N] reward of each token.
        values: [N] value of the state before each token; read under `mask` only.
        mask: [N] action tokens.
        lengths: [B] tokens of each sequence.
        gamma: Discount a step, in [0, 1].
        lam: Weight of longer returns, in [0, 1].
        spans: Rule for observation spans.

    Returns:
        [N] advantages and [N] returns, 0 where mask is 0.
    """
    state_values: Float = np.asarray(np.where(mask, values, 0.0), dtype=np.float64)
    grid = _grid(mask, lengths, spans)
    reward, value = grid.dense(np.where(mask, rewards, 0.0)), grid.dense(state_values)
    next_value = np.zeros_like(value)
    next_value[:, :-1] = value[:, 1:]
    delta = reward + gamma * next_value - value
    advantages = grid.flat(_discounted_sums(delta, gamma * lam), len(mask))
    advantages = np.where(mask, advantages, 0.0)
    return advantages, advantages + state_values


def discounted_returns(
    rewards: Float,
    mask: Bool,
    lengths: NDArray[np.integer],
    *,
    gamma: float,
    spans: Spans = "carry",
) -> Float:
    """G_t = r_t + gamma G_{t+1}. [N] -> [N], 0 where mask is 0; arguments as in `gae`."""
    grid = _grid(mask, lengths, spans)
    dense = _discounted_sums(grid.dense(np.where(mask, rewards, 0.0)), gamma)
    return np.where(mask, grid.flat(dense, len(mask)), 0.0)


def _grid(mask: Bool, lengths: NDArray[np.integer], spans: Spans) -> Grid:
    """The steps of time: actions alone, or every token."""
    if spans == "carry":
        return Grid.of(mask, lengths)
    return Grid.of(np.ones_like(mask), lengths)


def _discounted_sums(steps: Float, factor: float) -> Float:
    """[B, T] y_t = x_t + factor * y_{t+1}."""
    result = np.zeros_like(steps)
    running = np.zeros(steps.shape[0])
    for t in range(steps.shape[1] - 1, -1, -1):
        running = steps[:, t] + factor * running
        result[:, t] = running
    return result

"""How often k tries at a problem would have solved it."""

from __future__ import annotations

from math import comb


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is correct.

    1 - C(n - c, k) / C(n, k): the share of all choices of k from the n samples that hold a correct
    one. Source: Chen et al. 2021, arXiv:2107.03374, equation 1. The mean of maxima over n samples
    is the same for k = n alone.

    Args:
        num_samples: samples of the problem, n.
        num_correct: those that solve it, c, at most n.
        k: tries, from 1 to n.

    Raises:
        ValueError: a number lies outside its range.
    """
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"{num_correct} of {num_samples} samples cannot be correct")
    if not 1 <= k <= num_samples:
        raise ValueError(f"{num_samples} samples say nothing of {k} tries")
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)

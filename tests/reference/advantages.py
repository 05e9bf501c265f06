"""Advantages written a second time: exact fractions and plain loops, from the formulas alone.

Nothing here is shared with `quartet.algorithms`. Sources: the papers named in docs/numerics.md.
A sample is a list of tokens; time, groups and the batch are loops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Token:
    """A token: chosen by the policy or not, its KL penalty, the value of the state before it."""

    action: bool
    kl: float = 0.0
    value: float = 0.0


@dataclass(frozen=True)
class Case:
    """A sample with its reward; `scored` False: the reward is missing."""

    tokens: tuple[Token, ...]
    reward: float
    group: int
    scored: bool = True

    @property
    def usable(self) -> bool:
        return self.scored and any(t.action for t in self.tokens)


@dataclass(frozen=True)
class Recipe:
    """The settings by the names of the flags."""

    estimator: str
    gamma: float = 1.0
    lam: float = 1.0
    no_std_norm: bool = False
    kl_coef: float = 0.0
    clip: tuple[float, float] = (-10.0, 10.0)
    clip_after: bool = False
    decay: bool = False
    eps: float = 1e-6


def advantages(cases: list[Case], recipe: Recipe) -> tuple[list[list[float]], list[list[float]]]:
    """Advantages and returns of every token, 0 off the actions."""
    shaped = _shaped(cases, recipe)
    gains: list[list[float]] = []
    returns: list[list[float]] = []
    for case, reward in zip(cases, shaped, strict=True):
        gain, back = _one(case, reward, recipe)
        gains.append(gain)
        returns.append(back)
    if recipe.estimator in ("gae", "reinforce", "reinforce_baseline"):
        _normalise(cases, gains, scale=not recipe.no_std_norm)
    return gains, returns


def _shaped(cases: list[Case], recipe: Recipe) -> list[float | None]:
    """Each sample's reward after clip and baseline; None for one that is left out."""
    low, high = recipe.clip
    rewards = [
        Fraction(case.reward)
        if recipe.clip_after
        else _clip(Fraction(case.reward), low, high)
        if case.usable
        else None
        for case in cases
    ]
    rewards = [r if c.usable else None for r, c in zip(rewards, cases, strict=True)]
    shaped: list[float | None] = []
    for i, case in enumerate(cases):
        own = rewards[i]
        if own is None:
            shaped.append(None)
            continue
        group = [r for r, c in zip(rewards, cases, strict=True) if c.group == case.group]
        batch = [r for r in rewards if r is not None]
        value = _baseline(own, [r for r in group if r is not None], batch, recipe)
        shaped.append(float(_clip(value, low, high) if recipe.clip_after else value))
    return shaped


def _baseline(
    own: Fraction, group: list[Fraction], batch: list[Fraction], recipe: Recipe
) -> Fraction:
    match recipe.estimator:
        case "gae" | "reinforce":
            return own
        case "reinforce_baseline" | "dr_grpo":
            return own - Fraction(sum(group)) / len(group)
        case "rloo":
            if len(group) == 1:  # nobody to compare with: nothing to learn
                return Fraction(0)
            return own - (sum(group) - own) / (len(group) - 1)
        case "group_norm":
            mean = sum(group) / Fraction(len(group))
            if len(group) == 1 or len(set(group)) == 1:
                return Fraction(0)
            variance = sum((r - mean) ** 2 for r in group) / Fraction(len(group) - 1)
            return (own - mean) / Fraction(math.sqrt(variance) + recipe.eps)
        case "flash_reinforce":
            return own - Fraction(sum(batch)) / len(batch)
    raise AssertionError(recipe.estimator)


def _one(case: Case, reward: float | None, recipe: Recipe) -> tuple[list[float], list[float]]:
    """Advantages and returns of one sample, before normalisation over the batch."""
    size = len(case.tokens)
    if reward is None:
        return [0.0] * size, [0.0] * size
    actions = [i for i, token in enumerate(case.tokens) if token.action]
    coef = max(recipe.kl_coef, 0.0)
    paid = [-coef * t.kl if t.action else 0.0 for t in case.tokens]
    paid[actions[-1]] += reward
    steps = list(range(size)) if recipe.decay else actions
    critic = recipe.estimator == "gae"
    value = [t.value if t.action and critic else 0.0 for t in case.tokens]
    factor = recipe.gamma * (recipe.lam if critic else 1.0)
    gain, back = [0.0] * size, [0.0] * size
    later, next_value = 0.0, 0.0
    for i in reversed(steps):
        later = paid[i] + recipe.gamma * next_value - value[i] + factor * later
        next_value = value[i]
        if case.tokens[i].action:
            gain[i], back[i] = later, later + value[i]
    return gain, back


def _normalise(cases: list[Case], gains: list[list[float]], *, scale: bool) -> None:
    """Over all actions of the batch: minus the mean, times rsqrt(max(biased variance, 1e-8))."""
    where = [
        (row, i)
        for row, case in enumerate(cases)
        if case.usable
        for i, token in enumerate(case.tokens)
        if token.action
    ]
    if not where:
        return
    numbers = [gains[row][i] for row, i in where]
    mean = math.fsum(numbers) / len(numbers)
    variance = math.fsum((x - mean) ** 2 for x in numbers) / len(numbers)
    for row, i in where:
        gains[row][i] -= mean
        if scale:
            gains[row][i] /= math.sqrt(max(variance, 1e-8))


def _clip(x: Fraction, low: float, high: float) -> Fraction:
    return min(max(x, Fraction(low)), Fraction(high))


# Shaping of rewards ------------------------------------------------------------------------------


def overlong(reward: float, length: int, *, limit: int, buffer: float, factor: float) -> float:
    """DAPO: nothing up to limit - buffer, then a line down to -factor at the limit, then flat."""
    begin = limit - buffer
    if length <= begin:
        return reward
    if length >= limit:
        return reward - factor
    return reward - factor * (length - begin) / buffer


def stop_properly(reward: float, *, cut: bool, coef: float, legacy: bool) -> float:
    if not cut:
        return reward
    penalised = coef if coef < 0 else coef * reward
    if legacy:
        return penalised
    return penalised if penalised < reward else reward


def kl_estimate(logprob: float, ref: float, kind: str, *, bound_all: bool = False) -> float:
    """k1, k2, k3 of one token, as a penalty: k3 never above 10; with `bound_all` none beyond 10."""
    d = logprob - ref
    if kind == "k1":
        kl = d
    elif kind == "k2":
        kl = 0.5 * d * d
    else:
        kl = math.exp(-d) - 1.0 + d if d > -20 else 10.0
    if kind == "k3" or bound_all:
        kl = 10.0 if kl > 10 else -10.0 if kl < -10 else kl
    return kl


def adaptive_kl(coef: float, updates: list[tuple[float, int]], target: float, horizon: int):
    """Ziegler et al. 2019, with a factor of a step between a half and two."""
    values = []
    for kl, samples in updates:
        error = kl / target - 1.0
        error = -0.2 if error < -0.2 else 0.2 if error > 0.2 else error
        factor = 1.0 + error * samples / horizon
        coef = coef * (0.5 if factor < 0.5 else 2.0 if factor > 2.0 else factor)
        values.append(coef)
    return values


def pass_at_k(num_samples: int, num_correct: int, k: int) -> Fraction:
    """1 minus the chance of k draws without return that are all wrong."""
    wrong = Fraction(1)
    for i in range(k):
        left = num_samples - num_correct - i
        wrong *= Fraction(max(left, 0), num_samples - i)
    return 1 - wrong

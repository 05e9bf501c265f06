"""Losses written a second time: floats and plain loops, with gradients derived by hand.

Nothing here is shared with `quartet_learner.losses`. A batch is a list of sequences, a sequence a
list of its trained tokens; sums run over the whole step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Token:
    """Log-probabilities of one trained token under four models, its advantage, its entropy."""

    now: float
    old: float
    rollout: float
    ref: float
    advantage: float
    entropy: float = 0.0


Rows = list[list[Token]]


@dataclass(frozen=True)
class Recipe:
    """The settings by the names of the flags."""

    kind: str = "ppo"
    low: float = 0.2
    high: float = 0.2
    dual: float | None = None
    aggregation: str = "token-mean"
    length: int = 1
    entropy_coef: float | None = None
    kl: tuple[str, float, bool, bool] | None = None
    """Estimator, weight, unbiased gradient, all bounded."""
    correction: tuple[str, str, str, float, float] | None = None
    """Level, mode, gating, band."""


@dataclass
class Answer:
    """Loss, its derivative by each token's logprob and entropy, and what is logged."""

    loss: float
    by_logprob: list[list[float]]
    by_entropy: list[list[float]]
    metrics: dict[str, float] = field(default_factory=dict)


def weight(rows: Rows, row: list[Token], aggregation: str, length: int) -> float:
    """What one token of `row` counts in the loss of the step."""
    tokens = sum(len(r) for r in rows)
    sequences = sum(1 for r in rows if r)
    return {
        "token-mean": 1 / tokens,
        "seq-mean-token-mean": 1 / (len(row) * sequences),
        "seq-mean-token-sum": 1 / sequences,
        "seq-mean-token-sum-norm": 1 / (sequences * length),
    }[aggregation]


def policy(rows: Rows, recipe: Recipe) -> Answer:
    """The policy loss of a step with all its terms."""
    out = Answer(0.0, [[0.0] * len(r) for r in rows], [[0.0] * len(r) for r in rows])
    tokens = sum(len(r) for r in rows)
    clipped = ratio_sum = 0.0
    pure = 0.0
    for i, row in enumerate(rows):
        if not row:
            continue
        w = weight(rows, row, recipe.aggregation, recipe.length)
        factors = _factors(row, recipe)
        for j, token in enumerate(row):
            rho, moves = _ratio(row, token, recipe)
            loss, slope, cut = _surrogate(rho, token, recipe)
            pure += w * factors[j] * loss
            clipped += cut
            ratio_sum += rho
            if recipe.kind == "gspo":  # the ratio hangs on every token of the row alike
                for k in range(len(row)):
                    out.by_logprob[i][k] += w * slope * rho * moves / len(row)
            elif recipe.kind == "ppo":
                out.by_logprob[i][j] += w * factors[j] * slope * rho * moves
            else:
                out.by_logprob[i][j] += w * factors[j] * slope
            _add_terms(out, i, j, token, w, recipe)
    out.loss += pure
    out.metrics |= {
        "policy_loss": pure,
        "ppo_ratio": ratio_sum / tokens,
        "ppo_clip_ratio": clipped / tokens,
        "ppo_kl": sum(t.old - t.now for r in rows for t in r) / tokens,
        "vllm_kl": sum(t.rollout - t.old for r in rows for t in r) / tokens,
        "logprobs_diff": sum(t.now - t.ref for r in rows for t in r) / tokens,
    }
    if recipe.entropy_coef is not None:
        out.metrics["entropy_loss"] = sum(t.entropy for r in rows for t in r) / tokens
    if recipe.kl is not None:
        kind = recipe.kl[0]
        out.metrics["kl"] = sum(_kl(t.now - t.ref, kind)[0] for r in rows for t in r) / tokens
    if recipe.correction is not None and recipe.kind != "gspo":
        out.metrics["is_filter_ratio"] = outside_share(rows, recipe)
    return out


def _ratio(row: list[Token], token: Token, recipe: Recipe) -> tuple[float, float]:
    """The ratio, and 1 where it moves with the log-probability, 0 beyond +-20."""
    if recipe.kind == "gspo":
        base = [t.rollout if recipe.correction else t.old for t in row]
        x = sum(t.now - b for t, b in zip(row, base, strict=True)) / len(row)
    else:
        x = token.now - token.old
    return math.exp(min(max(x, -20.0), 20.0)), float(-20.0 <= x <= 20.0)


def _surrogate(rho: float, token: Token, recipe: Recipe) -> tuple[float, float, bool]:
    """Loss of a token, its derivative by the ratio (cispo: by logprob), whether the clip cut."""
    a = token.advantage
    kept = min(max(rho, 1 - recipe.low), 1 + recipe.high)
    if recipe.kind == "cispo":
        return -kept * a * token.now, -kept * a, kept != rho
    cut = kept * a < rho * a
    gain, slope = (kept * a, 0.0) if cut else (rho * a, a)
    if recipe.dual is not None and a < 0 and gain < recipe.dual * a:
        gain, slope = recipe.dual * a, 0.0
    return -gain, -slope, cut


def _factors(row: list[Token], recipe: Recipe) -> list[float]:
    """Weights of the mismatch correction of each token."""
    if recipe.correction is None or recipe.kind == "gspo":
        return [1.0] * len(row)
    level, mode, gating, low, high = recipe.correction
    weights = [math.exp(min(max(t.old - t.rollout, -20.0), 20.0)) for t in row]
    if mode == "clip":
        return [min(max(w, low), high) for w in weights]
    inside = [low <= s <= high for s in _statistics(row, level, gating)]
    return [w if ok else 0.0 for w, ok in zip(weights, inside, strict=True)]


def _statistics(row: list[Token], level: str, gating: str) -> list[float]:
    """What is compared with the band: of each token, or of the sequence for each of its tokens."""
    if gating == "ratio":
        logs = [t.old - t.rollout for t in row]
        if level == "seq":
            logs = [sum(logs) / len(logs)] * len(row)
        return [math.exp(min(max(x, -20.0), 20.0)) for x in logs]
    numbers = [_distance(t, gating) for t in row]
    return numbers if level == "token" else [sum(numbers) / len(numbers)] * len(row)


def _distance(token: Token, gating: str) -> float:
    p, q = (min(max(math.exp(x), 1e-6), 1 - 1e-6) for x in (token.rollout, token.old))
    if gating == "tv":
        return abs(p - q)
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def outside_share(rows: Rows, recipe: Recipe) -> float:
    """Share of units outside the band."""
    assert recipe.correction is not None
    level, _, gating, low, high = recipe.correction
    marks = [[not low <= s <= high for s in _statistics(r, level, gating)] for r in rows if r]
    if level == "seq":
        return sum(m[0] for m in marks) / len(marks)
    return sum(map(sum, marks)) / sum(map(len, marks))


def _add_terms(out: Answer, i: int, j: int, token: Token, w: float, recipe: Recipe) -> None:
    if recipe.kl is not None:
        kind, coef, unbiased, bound_all = recipe.kl
        d = token.now - token.ref
        value, slope = _kl(d, kind)
        if kind == "k3" and value > 10:
            value = 10.0
            slope = 1 - math.exp(2.6108686381498) if d < 0 else 1 - math.exp(-10.9999832980)
            slope = 0.0 if bound_all else slope
        elif bound_all and abs(value) > 10:
            value, slope = math.copysign(10.0, value), 0.0
        if unbiased:
            slope = min(math.exp(min(token.now - token.old, 20.0)), 10.0) * d
        out.loss += coef * w * value
        out.by_logprob[i][j] += coef * w * slope
    if recipe.entropy_coef is not None:
        out.loss -= recipe.entropy_coef * w * token.entropy
        out.by_entropy[i][j] -= recipe.entropy_coef * w


def _kl(d: float, kind: str) -> tuple[float, float]:
    """Estimate without bounds, and its derivative; k3 with d >= -20."""
    if kind == "k1":
        return d, 1.0
    if kind == "k2":
        return d * d / 2, d
    x = max(d, -20.0)
    return math.exp(-x) - 1 + x, 1 - math.exp(-x)


def value(
    rows: list[list[tuple[float, float, float]]], clip: float | None, aggregation: str
) -> tuple[float, list[list[float]]]:
    """Value loss of (value, old value, return) triples, and its derivative by the values."""
    loss, slopes = 0.0, [[0.0] * len(r) for r in rows]
    for i, row in enumerate(rows):
        for j, (v, old, back) in enumerate(row):
            w = weight(rows, row, aggregation, 1)  # pyright: ignore[reportArgumentType]
            error, slope = (v - back) ** 2, 2 * (v - back)
            if clip is not None:
                near = min(max(v, old - clip), old + clip)
                if (near - back) ** 2 > error:
                    error, slope = (near - back) ** 2, 2 * (near - back) * (near == v)
            loss += w * error / 2
            slopes[i][j] = w * slope / 2
    return loss, slopes


def preference(
    pairs: list[tuple[list[Token], list[Token]]],
    *,
    beta: float,
    smoothing: float,
    ipo: bool,
    ipo_sum: bool,
    nll: float,
) -> tuple[float, list[tuple[float, float]]]:
    """DPO, cDPO or IPO; and its derivative by a token of the chosen and the rejected answer."""
    total, slopes = 0.0, []
    for chosen, rejected in pairs:
        mean = ipo and not ipo_sum
        sizes = [len(chosen) if mean else 1, len(rejected) if mean else 1]
        gaps = [
            sum(t.now - t.ref for t in answer) / n
            for answer, n in zip((chosen, rejected), sizes, strict=True)
        ]
        x = gaps[0] - gaps[1]
        if ipo:
            loss, slope = (x - 0.5 / beta) ** 2, 2 * (x - 0.5 / beta)
        else:
            loss = (1 - smoothing) * _softplus(-beta * x) + smoothing * _softplus(beta * x)
            slope = beta * ((smoothing - 1) * _sigmoid(-beta * x) + smoothing * _sigmoid(beta * x))
        chosen_nll = -sum(t.now for t in chosen) / len(chosen)
        total += loss + nll * chosen_nll
        slopes.append((slope / sizes[0] - nll / len(chosen), -slope / sizes[1]))
    count = len(pairs)
    return total / count, [(a / count, b / count) for a, b in slopes]


def pairwise(pairs: list[tuple[float, float]], margins: list[float] | None, kind: str) -> float:
    """Mean of -log sigmoid(chosen - rejected - margin); logexp has no margin."""
    total = 0.0
    for i, (chosen, rejected) in enumerate(pairs):
        margin = margins[i] if margins is not None and kind == "sigmoid" else 0.0
        total += _softplus(rejected - chosen + margin)
    return total / len(pairs)


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))

"""Every loss, with every setting, against plain loops over random ragged batches.

Values and gradients, in float64, so that a wrong digit cannot hide behind rounding; and in fp32
with log-probabilities far apart, where nothing may be NaN or infinite.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from quartet_learner.losses import (
    StepCounts,
    TokenBatch,
    dpo_loss,
    pairwise_loss,
    policy_loss,
    value_loss,
)

from quartet.types import (
    DpoLoss,
    KlLoss,
    MismatchCorrection,
    PairwiseLoss,
    PolicyLoss,
    ValueLoss,
)
from tests.reference import losses as plain

AGGREGATIONS = [
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
]
NAMES = ("now", "old", "rollout", "ref", "advantage", "entropy")
BANDS = [(0.5, 5.0), (0.0, 2.0), (0.9, 1.1)]
UNITS = [
    ("token", "clip", "ratio"),
    *((level, "mask", gating) for level in ("token", "seq") for gating in ("ratio",)),
    *((level, "mask", gating) for level in ("token", "seq") for gating in ("binary_kl", "tv")),
]


def tokens(spread: float):
    """Log-probabilities of four models that are near each other, or far apart."""
    step = st.floats(-spread, spread)
    return st.builds(
        lambda now, a, b, c, advantage, entropy: plain.Token(
            now, min(now + a, 0.0), min(now + b, 0.0), min(now + c, 0.0), advantage, entropy
        ),
        st.floats(-8, -0.01),
        step,
        step,
        step,
        st.one_of(st.sampled_from([0.0, 1.0, -1.0]), st.floats(-3, 3)),
        st.floats(0, 3),
    )


def rows_of(spread: float):
    return st.lists(st.lists(tokens(spread), max_size=5), min_size=1, max_size=5).filter(any)


@st.composite
def recipes(draw, kind):
    unit = draw(st.sampled_from(UNITS))
    low, high = draw(st.sampled_from(BANDS))
    if unit[2] != "ratio":
        low, high = 0.0, draw(st.sampled_from([0.003, 0.03, 0.2]))
    return plain.Recipe(
        kind=kind,
        low=draw(st.sampled_from([0.0003, 0.2])),
        high=draw(st.sampled_from([0.0004, 0.2, 0.28])),
        dual=draw(st.sampled_from([None, 1.3, 3.0])),
        aggregation=draw(st.sampled_from(AGGREGATIONS)),
        length=draw(st.integers(1, 9)),
        entropy_coef=draw(st.sampled_from([None, 0.0, 0.01])),
        kl=draw(
            st.none()
            | st.tuples(
                st.sampled_from(["k1", "k2", "k3"]),
                st.sampled_from([0.01, 0.5]),
                st.booleans(),
                st.booleans(),
            )
        ),
        correction=draw(st.none() | st.just((*unit, low, high))),
    )


def spec_of(recipe: plain.Recipe) -> PolicyLoss:
    kl = correction = None
    if recipe.kl is not None:
        estimator, coef, unbiased, bound_all = recipe.kl
        kl = KlLoss(
            coef=coef,
            estimator=estimator,  # pyright: ignore[reportArgumentType]
            unbiased_gradient=unbiased,
            bound_all=bound_all,
        )
    if recipe.correction is not None:
        level, mode, gating, low, high = recipe.correction
        correction = MismatchCorrection(
            level=level,  # pyright: ignore[reportArgumentType]
            mode=mode,  # pyright: ignore[reportArgumentType]
            gating=gating,  # pyright: ignore[reportArgumentType]
            threshold_low=low,
            threshold_high=high,
        )
    return PolicyLoss(
        type=recipe.kind,  # pyright: ignore[reportArgumentType]
        eps_clip_low=recipe.low,
        eps_clip_high=recipe.high,
        dual_clip=recipe.dual,
        aggregation=recipe.aggregation,  # pyright: ignore[reportArgumentType]
        aggregation_length=recipe.length,
        entropy_coef=recipe.entropy_coef,
        kl_loss=kl,
        mismatch_correction=correction,
    )


def columns(rows: plain.Rows, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    flat = [t for row in rows for t in row]
    return {n: torch.tensor([getattr(t, n) for t in flat], dtype=dtype) for n in NAMES}


def segments(rows) -> torch.Tensor:
    return torch.tensor([i for i, row in enumerate(rows) for _ in row], dtype=torch.long)


def counts_of(rows, pairs: int = 0) -> StepCounts:
    return StepCounts(tokens=sum(map(len, rows)), sequences=sum(1 for r in rows if r), pairs=pairs)


def ours(rows: plain.Rows, recipe: plain.Recipe, dtype=torch.float64):
    """The learner's loss, its gradients by logprob and entropy, and its metrics."""
    c = columns(rows, dtype)
    batch = TokenBatch(
        segments=segments(rows),
        num_sequences=len(rows),
        advantages=c["advantage"],
        old_logprobs=c["old"],
        ref_logprobs=c["ref"],
        rollout_logprobs=c["rollout"],
    )
    now, entropy = c["now"].requires_grad_(), c["entropy"].requires_grad_()
    out = policy_loss(spec_of(recipe), batch, now, entropy, counts_of(rows))
    grads = torch.autograd.grad(out.loss, (now, entropy), allow_unused=True)
    return out, [torch.zeros_like(now) if g is None else g for g in grads]


def far_from_every_edge(rows: plain.Rows, recipe: plain.Recipe) -> bool:
    """No number so near a border that rounding could put it on the other side."""
    edges = [math.log1p(-recipe.low), math.log1p(recipe.high), 20.0, -20.0, math.log(10.0)]
    edges += [math.log(recipe.dual)] if recipe.dual else []
    logs = [t.now - t.old for r in rows for t in r]
    for base in ("old", "rollout"):
        logs += [sum(t.now - getattr(t, base) for t in r) / len(r) for r in rows if r]
    if any(abs(x - edge) < 1e-5 for x in logs for edge in edges):
        return False
    if recipe.kl is not None:
        borders = (-10.0, 10.0, -(20**0.5), 20**0.5, -2.61086864, 10.9999833, -20.0)
        if any(abs(t.now - t.ref - b) < 1e-5 for r in rows for t in r for b in borders):
            return False
    if recipe.correction is None:
        return True
    level, _, gating, low, high = recipe.correction
    numbers = [s for r in rows if r for s in plain._statistics(r, level, gating)]
    return all(
        abs(s - edge) > 1e-5 or (edge == 0 and s >= 0) for s in numbers for edge in (low, high)
    )


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo"])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_policy_losses(kind, data):
    recipe = data.draw(recipes(kind))
    rows = data.draw(st.sampled_from([0.3, 2.0, 8.0]).flatmap(rows_of))
    assume(far_from_every_edge(rows, recipe))
    expected = plain.policy(rows, recipe)
    out, (by_logprob, by_entropy) = ours(rows, recipe)
    scale = 1.0 + abs(expected.loss)
    assert out.loss.item() == pytest.approx(expected.loss, rel=1e-6, abs=1e-6 * scale)
    wanted = torch.tensor([g for row in expected.by_logprob for g in row], dtype=torch.float64)
    torch.testing.assert_close(by_logprob, wanted, rtol=2e-6, atol=1e-7)
    wanted = torch.tensor([g for row in expected.by_entropy for g in row], dtype=torch.float64)
    torch.testing.assert_close(by_entropy, wanted, rtol=2e-6, atol=1e-9)
    found = {name: value.item() for name, value in out.metrics.items()}
    assert found == pytest.approx(expected.metrics, rel=2e-5, abs=2e-6)


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_logprobs_far_apart_stay_finite_in_fp32(kind, data):
    """Differences of hundreds: no exponential may become inf, and no gradient NaN."""
    recipe = data.draw(recipes(kind))
    rows = data.draw(st.sampled_from([60.0, 900.0, 3e4]).flatmap(rows_of))
    out, grads = ours(rows, recipe, dtype=torch.float32)
    assert math.isfinite(out.loss.item())
    assert all(torch.isfinite(g).all() for g in grads)
    assert all(math.isfinite(value.item()) for value in out.metrics.values())


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_cut_adds_up_to_the_step(kind, data):
    """Micro-batches in any order, empty ones too: the same loss, gradients and metrics."""
    recipe = data.draw(recipes(kind))
    rows = data.draw(rows_of(2.0))
    order = data.draw(st.permutations(range(len(rows))))
    cuts = data.draw(st.lists(st.integers(0, len(rows)), max_size=3).map(sorted))
    whole, grads = ours(rows, recipe)
    counts, loss, metrics = counts_of(rows), 0.0, dict.fromkeys(whole.metrics, 0.0)
    by_row: dict[int, list[float]] = {}
    for start, stop in zip([0, *cuts], [*cuts, len(rows)], strict=True):
        part = [rows[i] for i in order[start:stop]]
        c = columns(part, torch.float64)
        batch = TokenBatch(
            segments=segments(part),
            num_sequences=max(len(part), 1),
            advantages=c["advantage"],
            old_logprobs=c["old"],
            ref_logprobs=c["ref"],
            rollout_logprobs=c["rollout"],
        )
        now = c["now"].requires_grad_()
        out = policy_loss(spec_of(recipe), batch, now, c["entropy"], counts)
        (grad,) = torch.autograd.grad(out.loss, now)
        loss += out.loss.item()
        metrics = {name: metrics[name] + value.item() for name, value in out.metrics.items()}
        places = [i for i in order[start:stop] for _ in rows[i]]
        for i, number in zip(places, grad.tolist(), strict=True):
            by_row.setdefault(i, []).append(number)
    assert loss == pytest.approx(whole.loss.item(), rel=1e-6, abs=1e-9)
    joined = [number for i in sorted(by_row) for number in by_row[i]]
    assert joined == pytest.approx(grads[0].tolist(), rel=1e-6, abs=1e-12)
    found = {name: value.item() for name, value in whole.metrics.items()}
    assert metrics == pytest.approx(found, rel=1e-5, abs=1e-7)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.lists(st.tuples(*[st.floats(-3, 3)] * 3), max_size=4), min_size=1, max_size=4
    ).filter(any),
    clip=st.sampled_from([None, 0.2, 0.5]),
    aggregation=st.sampled_from(AGGREGATIONS[:3]),
)
def test_value_losses(rows, clip, aggregation):
    def edge(v: float, old: float, back: float) -> bool:
        return clip is not None and (
            abs(abs(v - old) - clip) < 1e-6
            or (
                abs(abs(v - back) - abs(min(max(v, old - clip), old + clip) - back)) < 1e-6
                and abs(v - old) > clip
            )
        )

    assume(not any(edge(*triple) for row in rows for triple in row))
    flat = torch.tensor([t for row in rows for t in row], dtype=torch.float64)
    batch = TokenBatch(
        segments=segments(rows),
        num_sequences=len(rows),
        old_values=flat[:, 1],
        returns=flat[:, 2],
    )
    values = flat[:, 0].clone().requires_grad_()
    spec = ValueLoss(value_clip=clip, aggregation=aggregation)
    out = value_loss(spec, batch, values, counts_of(rows))
    (grad,) = torch.autograd.grad(out.loss, values)
    loss, slopes = plain.value(rows, clip, aggregation)
    assert out.loss.item() == pytest.approx(loss, rel=1e-6, abs=1e-9)
    assert grad.tolist() == pytest.approx([s for row in slopes for s in row], rel=1e-6, abs=1e-9)


ANSWERS = st.lists(tokens(2.0), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(
    pairs=st.lists(st.tuples(ANSWERS, ANSWERS), min_size=1, max_size=3),
    beta=st.sampled_from([0.05, 0.1, 0.5, 2.0]),
    smoothing=st.sampled_from([0.0, 0.1, 0.4]),
    ipo=st.booleans(),
    ipo_sum=st.booleans(),
    nll=st.sampled_from([0.0, 0.2]),
)
def test_preference_losses(pairs, beta, smoothing, ipo, ipo_sum, nll):
    rows = [answer for pair in pairs for answer in pair]
    c = columns(rows, torch.float64)
    batch = TokenBatch(segments=segments(rows), num_sequences=len(rows), ref_logprobs=c["ref"])
    spec = DpoLoss(
        beta=beta, label_smoothing=smoothing, ipo=ipo, ipo_sum=ipo_sum, nll_loss_coef=nll
    )
    now = c["now"].requires_grad_()
    out = dpo_loss(spec, batch, now, counts_of(rows, len(pairs)))
    (grad,) = torch.autograd.grad(out.loss, now)
    loss, slopes = plain.preference(
        pairs, beta=beta, smoothing=smoothing, ipo=ipo, ipo_sum=ipo_sum, nll=nll
    )
    assert out.loss.item() == pytest.approx(loss, rel=1e-9, abs=1e-12)
    wanted = [
        slope
        for pair, both in zip(pairs, slopes, strict=True)
        for answer, slope in zip(pair, both, strict=True)
        for _ in answer
    ]
    assert grad.tolist() == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    pairs=st.lists(
        st.tuples(st.floats(-2000, 2000), st.floats(-2000, 2000), st.floats(-2, 2)),
        min_size=1,
        max_size=4,
    ),
    kind=st.sampled_from(["sigmoid", "logexp"]),
    with_margin=st.booleans(),
)
def test_pairwise_losses(pairs, kind, with_margin):
    rewards = torch.tensor([r for pair in pairs for r in pair[:2]], dtype=torch.float64)
    margins = torch.tensor([p[2] for p in pairs], dtype=torch.float64) if with_margin else None
    rewards.requires_grad_()
    counts = StepCounts(tokens=1, sequences=2 * len(pairs), pairs=len(pairs))
    out = pairwise_loss(PairwiseLoss(type=kind), rewards, margins, counts)
    expected = plain.pairwise(
        [p[:2] for p in pairs], [p[2] for p in pairs] if with_margin else None, kind
    )
    assert out.loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-9)
    (grad,) = torch.autograd.grad(out.loss, rewards)
    assert torch.isfinite(grad).all()
    torch.testing.assert_close(grad[0::2], -grad[1::2])

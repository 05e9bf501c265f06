"""One optimizer step, cut in any way: the same gradient and the same metrics.

tests/integration/test_learner_cuts.py does the same over ranks.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quartet_learner.samples import take

from quartet.types import DpoLoss, Head, KlLoss, PairwiseLoss, PolicyLoss, SftLoss, ValueLoss

from .steps import make_samples, step_of

KL = KlLoss(coef=0.1, estimator="k3")
LOSSES = {
    "lm": (
        PolicyLoss(kl_loss=KL, entropy_coef=0.01, temperature=0.9),
        PolicyLoss(type="gspo", kl_loss=KL),
        PolicyLoss(type="cispo", aggregation="seq-mean-token-mean"),
        PolicyLoss(aggregation="seq-mean-token-sum-norm", aggregation_length=20),
        SftLoss(),
        DpoLoss(),
    ),
    "value": (ValueLoss(),),
    "reward": (PairwiseLoss(), PairwiseLoss(type="logexp")),
}
EVERYTHING = 10_000


@pytest.fixture(scope="module", params=["lm", "value", "reward"])
def trained(request, tiny_model_dir, group):
    """A head's engine that never moves (its rate is 0), and the gradient of its last step."""
    from quartet_learner.engine import LearnerEngine
    from quartet_learner.settings import LearnerSettings

    from quartet.types import OptimizerConfig, RunSpec, ScheduleConfig

    engine = LearnerEngine(
        LearnerSettings(model_name_or_path=str(tiny_model_dir), head=Head(request.param)), group
    )
    schedule = ScheduleConfig(name="constant", total_steps=10)
    optimizer = OptimizerConfig(lr=0.0)
    engine.start_run(RunSpec(run_id="run", optimizer=optimizer, schedule=schedule, max_norm=0.0))
    seen = []
    original = engine.run.deepspeed.step

    def step():
        seen.append(torch.cat([p.grad.double().flatten() for p in engine.model.hf.parameters()]))
        original()

    engine.run.deepspeed.step = step

    def train(loss, samples, *, packed=False, **limits):
        engine.settings = replace(engine.settings, packed=packed)
        result = engine.train(step_of(loss, engine.run.optimizer_steps, **limits), samples)
        return seen.pop(), {**result.metrics, "grad_norm": result.grad_norm}

    return request.param, train


@st.composite
def cuts(draw):
    """Lengths, a seed, an order of pairs, limits, and the layout."""
    pairs = draw(st.integers(1, 6))
    lengths = tuple(draw(st.lists(st.integers(2, 24), min_size=2 * pairs, max_size=2 * pairs)))
    limits = draw(
        st.one_of(
            st.fixed_dictionaries({"max_tokens_per_micro_batch": st.integers(50, 200)}),
            st.fixed_dictionaries({"micro_batch_size": st.integers(1, 5)}),
        )
    )
    order = draw(st.permutations(range(pairs)))
    return lengths, draw(st.integers(0, 99)), order, limits, draw(st.booleans())


@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(cut=cuts(), number=st.integers(0, 5))
def test_no_cut_shows_in_gradient_or_metrics(trained, cut, number):
    head, train = trained
    lengths, seed, order, limits, packed = cut
    loss = LOSSES[head][number % len(LOSSES[head])]
    samples = make_samples(seed, lengths)
    expected, logged = train(loss, samples, max_tokens_per_micro_batch=EVERYTHING)
    shuffled = take(samples, [row for pair in order for row in (2 * pair, 2 * pair + 1)])
    gradient, metrics = train(loss, shuffled, packed=packed, **limits)
    assert (gradient - expected).norm() <= 1e-6 * expected.norm()
    assert metrics == pytest.approx(logged, rel=1e-6, abs=1e-6)

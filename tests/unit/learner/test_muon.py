"""Muon: an independent expression of its update, who is moved by what, and its saves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from quartet_learner import checks
from quartet_learner.muon import matrices

from quartet.errors import ConfigError
from quartet.types import MuonConfig, OptimizerConfig, RunSpec, ScheduleConfig, SftLoss, ValueLoss

from .conftest import weights_of
from .steps import make_samples, step_of
from .test_checkpoint import load, run_steps, save

LR = 0.02
A, B, C = 3.4445, -4.7750, 2.0315


def orthogonal(update: np.ndarray, steps: int) -> np.ndarray:
    """p(s) = A s + B s^3 + C s^5 on the singular values, by an SVD instead of matrix products."""
    u, s, vt = np.linalg.svd(update, full_matrices=False)
    s = s / np.linalg.norm(s)
    for _ in range(steps):
        s = A * s + B * s**3 + C * s**5
    return u @ np.diag(s) @ vt


def expected_moves(gradients: list[np.ndarray], config: MuonConfig) -> np.ndarray:
    total, velocity = np.zeros_like(gradients[0]), np.zeros_like(gradients[0])
    for gradient in gradients:
        velocity = config.momentum * velocity + (1 - config.momentum) * gradient
        update = velocity
        if config.nesterov:
            update = config.momentum * velocity + (1 - config.momentum) * gradient
        rows, columns = gradient.shape
        total += orthogonal(update, config.ns_steps) * max(1, rows / columns) ** 0.5
    return -config.lr * total


CONFIGS = (
    MuonConfig(lr=LR),
    MuonConfig(lr=LR, nesterov=False, momentum=0.8),
    MuonConfig(lr=LR, ns_steps=3),
)


@pytest.mark.parametrize("config", CONFIGS)
def test_every_matrix_moves_as_the_formula_says(make_engine, config):
    engine = make_engine(optimizer=OptimizerConfig(type="muon", lr=1e-3, muon=config), max_norm=0)
    moved = {id(p) for p in matrices(engine.model.hf).values()}
    names = {n: p for n, p in engine.model.hf.named_parameters() if id(p) in moved}
    start, seen = weights_of(engine), {name: [] for name in names}
    original = engine.run.deepspeed.optimizer.parts[1].step

    def record():
        for name, parameter in names.items():
            seen[name].append(parameter.grad.double().numpy().copy())
        original()

    engine.run.deepspeed.optimizer.parts[1].step = record
    for number in range(2):
        assert engine.train(step_of(SftLoss(), number), make_samples(seed=number)).applied
    now = weights_of(engine)
    for name in names:
        move = (now[name] - start[name]).double().numpy()
        errors = {}
        for other in CONFIGS:
            expected = expected_moves(seen[name], other)
            errors[other] = np.linalg.norm(move - expected) / np.linalg.norm(expected)
        # The iterations run in bf16 and stretch small singular values, and their errors, 500 times.
        assert errors[config] < 0.1, (name, errors)
        assert all(errors[config] < 0.7 * errors[o] for o in CONFIGS if o != config), (name, errors)


def muon_spec() -> OptimizerConfig:
    return OptimizerConfig(type="muon", lr=1e-3, muon=MuonConfig(lr=LR))


@pytest.mark.parametrize(("head", "loss"), [("lm", SftLoss()), ("value", ValueLoss())])
def test_embeddings_heads_and_vectors_are_adams(make_engine, head, loss):
    both = make_engine(head=head, optimizer=muon_spec(), max_norm=0)
    adam = make_engine(head=head, lr=1e-3, max_norm=0)
    for engine in (both, adam):
        engine.train(step_of(loss), make_samples())
    by_adam = weights_of(adam)
    for name, weight in weights_of(both).items():
        outside = weight.ndim == 1 or any(part in name for part in ("embed", "lm_head", "score"))
        assert torch.allclose(weight, by_adam[name], atol=1e-7) == outside, name


def test_one_schedule_moves_both_rates(make_engine):
    schedule = ScheduleConfig(
        name="cosine_with_min_lr", total_steps=4, warmup_ratio=0.5, min_lr_ratio=0.1
    )
    engine = make_engine(optimizer=muon_spec(), schedule=schedule, max_norm=0)
    groups = engine.run.deepspeed.optimizer.param_groups
    rates = []
    for number in range(5):
        rates.append([group["lr"] for group in groups])
        engine.train(step_of(SftLoss(), number), make_samples())
    shares = [[rate / peak for rate, peak in zip(r, (1e-3, 1e-3, LR), strict=True)] for r in rates]
    for step, share in zip(shares, (0.0, 0.5, 1.0, 0.55, 0.1), strict=True):
        assert step == pytest.approx([share] * 3)


def test_a_continued_run_is_the_undisturbed_one(make_engine, tmp_path):
    engine = make_engine(optimizer=muon_spec(), max_norm=0)
    run_steps(engine, 0, 2)
    save(engine, tmp_path, "two")
    expected = run_steps(engine, 2, 2)
    other = make_engine(run_id="other")
    load(other, tmp_path)
    assert run_steps(other, 2, 2) == expected
    weights = weights_of(other)
    assert all(torch.equal(weights[name], w) for name, w in weights_of(engine).items())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_partitions_matrices_is_refused(stage):
    spec = RunSpec(run_id="r", optimizer=muon_spec(), schedule=ScheduleConfig())
    checks.check_run(spec, 0, zero_stage=0)
    with pytest.raises(ConfigError, match="whole matrices") as caught:
        checks.check_run(spec, 0, zero_stage=stage)
    assert "--ds.zero_stage 0" in caught.value.info.remedy

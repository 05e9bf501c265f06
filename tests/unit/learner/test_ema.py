"""The moving average: its recursion, what holds it and what does not, and its way through saves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from quartet_learner.ema import FILE
from safetensors.torch import load_file

from quartet.types import SftLoss
from quartet.types.requests import ExportModelRequest

from .conftest import weights_of
from .steps import make_samples, step_of
from .test_checkpoint import load, run_steps, save

BETA = 0.75


def exported(engine, folder) -> dict[str, torch.Tensor]:
    engine.export_model(ExportModelRequest(request_id="e", folder=str(folder)))
    return load_file(folder / "model.safetensors")


def recursion(history: list[np.ndarray]) -> np.ndarray:
    """The same number as a sum: beta^n w_0 + sum of (1 - beta) beta^(n - k) w_k."""
    n = len(history) - 1
    parts = [(1 - BETA) * BETA ** (n - k) * history[k] for k in range(1, n + 1)]
    return BETA**n * history[0] + np.sum(parts, axis=0)


@pytest.mark.parametrize(
    ("stage", "settings"),
    [(0, {}), (1, {"param_dtype": "bfloat16"}), (2, {}), (3, {}), (0, {"head": "value"})],
)
def test_exports_hold_the_average_and_pushes_the_weights(make_engine, tmp_path, stage, settings):
    from quartet.types import ValueLoss
    from quartet.weights import manifest_of_model, plan_buckets, unpack_bucket

    loss = ValueLoss() if settings.get("head") == "value" else SftLoss()
    engine = make_engine(zero_stage=stage, lr=1e-2, ema_beta=BETA, **settings)
    history = [weights_of(engine)]
    for number in range(3):
        engine.train(step_of(loss, number), make_samples(seed=number))
        history.append(weights_of(engine))
    stored = exported(engine, tmp_path / "out")
    half = settings.get("param_dtype") == "bfloat16"
    for name, now in history[-1].items():
        expected = recursion([weights[name].double().numpy() for weights in history])
        tolerance = {"rtol": 4e-3, "atol": 1e-6} if half else {"rtol": 2e-6, "atol": 1e-8}
        np.testing.assert_allclose(stored[name].double().numpy(), expected, **tolerance)
        # Not rounded to the weights' own type between the steps.
        average = engine.run.average.values[name]
        assert average.dtype is torch.float32
        np.testing.assert_allclose(average.numpy(), expected, rtol=2e-6, atol=1e-8)
        assert not torch.equal(average, now)
    manifest = manifest_of_model(engine.model.hf, bucket_bytes=16 << 10)
    plan = plan_buckets(manifest)
    for index, flat in engine.buckets(manifest):
        for name, tensor in unpack_bucket(plan[index], flat):
            assert torch.equal(tensor.float(), history[-1][name]), name


def test_a_refused_step_does_not_move_it(make_engine):
    from dataclasses import replace

    engine = make_engine(ema_beta=BETA, lr=1e-2)
    samples = make_samples()
    engine.train(step_of(), samples)
    before = {name: value.clone() for name, value in engine.run.average.values.items()}
    bad = replace(samples, advantages=np.full_like(samples.advantages, 3e38))
    assert not engine.train(step_of(number=1), bad).applied
    assert all(torch.equal(before[name], v) for name, v in engine.run.average.values.items())


@pytest.mark.parametrize("stage", [0, 3])
def test_a_continued_run_averages_on_bit_for_bit(make_engine, tmp_path, stage):
    engine = make_engine(zero_stage=stage, lr=1e-2, ema_beta=BETA)
    run_steps(engine, 0, 2)
    save(engine, tmp_path / "ckpt", "two")
    assert (tmp_path / "ckpt" / "two" / FILE).is_file()
    run_steps(engine, 2, 2)
    expected = {name: value.clone() for name, value in engine.run.average.values.items()}
    other = make_engine(zero_stage=stage, lr=1e-2, run_id="other")
    assert other.run.average is None
    load(other, tmp_path / "ckpt")
    run_steps(other, 2, 2)
    assert all(torch.equal(other.run.average.values[n], value) for n, value in expected.items())
    assert expected.keys() == other.run.average.values.keys()


def test_without_it_there_is_none(make_engine, tmp_path):
    engine = make_engine(lr=1e-2)
    run_steps(engine, 0, 1)
    save(engine, tmp_path / "ckpt", "one")
    assert not (tmp_path / "ckpt" / "one" / FILE).exists()
    now = weights_of(engine)
    stored = exported(engine, tmp_path / "out")
    assert all(torch.equal(stored[name], weight) for name, weight in now.items())

"""The balance loss of a router: that of transformers on each sequence, however a step is cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from quartet_learner.conductor import Conductor
from quartet_learner.losses import balance_by_sequence

from quartet.errors import ConfigError, RequestError
from quartet.types import (
    OptimizerConfig,
    PairwiseLoss,
    PolicyLoss,
    RunSpec,
    ScheduleConfig,
    SftLoss,
    ValueLoss,
)
from quartet.types.requests import StartRunRequest

from .steps import make_samples, step_of

COEF = 0.5


def test_each_sequence_has_the_loss_of_transformers():
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    generator = torch.Generator().manual_seed(1)
    lengths = (3, 1, 5)
    padded = tuple(torch.randn(3 * 5, 4, generator=generator) for _ in range(2))
    places = torch.cat([row * 5 + torch.arange(n) for row, n in enumerate(lengths)])
    owners = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    ours = balance_by_sequence(padded, places, owners, 3, top_k=2)
    for row, n in enumerate(lengths):
        alone = tuple(layer[row * 5 : row * 5 + n] for layer in padded)
        assert ours[row].item() == pytest.approx(float(load_balancing_loss_func(alone, 4, 2)))


def test_it_is_the_number_of_experts_taken_where_all_are_used_alike():
    logits = torch.eye(4).repeat(3, 1) * 50
    loss = balance_by_sequence((logits,), torch.arange(12), torch.zeros(12).long(), 1, top_k=1)
    assert loss.item() == pytest.approx(1.0)
    collapsed = torch.zeros(12, 4)
    collapsed[:, 2] = 50
    worst = balance_by_sequence((collapsed,), torch.arange(12), torch.zeros(12).long(), 1, top_k=1)
    assert worst.item() == pytest.approx(4.0)


def plain_torch(folder, samples) -> tuple[float, float]:
    """The balance loss of the step and the norm of the whole gradient, by transformers alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total = samples.sequences.num_tokens
    loss, balance = torch.zeros(()), torch.zeros(())
    rows = zip(samples.sequences.rows(), samples.sequences.rows(samples.action_mask), strict=True)
    for row, mask in rows:
        ids = torch.tensor(row.tolist())
        out = model(ids[None], output_router_logits=True)
        log_p = out.logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        loss = loss - log_p[torch.tensor(mask[1:])].sum() / int(samples.action_mask.sum())
        balance = balance + out.aux_loss * len(ids) / total
    (loss + COEF * balance).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return balance.item(), torch.nn.utils.get_total_norm(grads).item()


@pytest.mark.parametrize(
    ("settings", "limits"),
    [
        ({}, {"micro_batch_size": 8}),
        ({}, {"micro_batch_size": 3}),
        ({"packed": True}, {"max_tokens_per_micro_batch": 26}),
        ({"zero_stage": 2}, {"micro_batch_size": 1}),
        ({"zero_stage": 3}, {"micro_batch_size": 3}),
        ({"gradient_checkpointing": True}, {"micro_batch_size": 3}),
    ],
)
def test_loss_and_gradient_are_those_of_plain_torch_however_cut(
    make_engine, tiny_moe_dir, settings, limits
):
    samples = make_samples()
    balance, norm = plain_torch(tiny_moe_dir, samples)
    engine = make_engine(model=tiny_moe_dir, with_router_loss=True, **settings)
    result = engine.train(step_of(SftLoss(aux_loss_coef=COEF), **limits), samples)
    assert result.metrics["aux_loss"] == pytest.approx(balance, rel=1e-5)
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    assert engine.model.experts_taken == 2


@pytest.mark.parametrize(
    ("head", "loss"), [("lm", PolicyLoss), ("value", ValueLoss), ("reward", PairwiseLoss)]
)
def test_every_loss_has_it(make_engine, tiny_moe_dir, head, loss):
    with_loss, without = (
        make_engine(model=tiny_moe_dir, head=head, with_router_loss=True).train(
            step_of(loss(aux_loss_coef=coef)), make_samples()
        )
        for coef in (COEF, 0.0)
    )
    assert with_loss.metrics["aux_loss"] >= 2 * 0.9
    assert "aux_loss" not in without.metrics
    assert with_loss.grad_norm > without.grad_norm


def test_training_on_it_balances_the_experts(make_engine, tiny_moe_dir):
    engine = make_engine(model=tiny_moe_dir, with_router_loss=True, lr=1e-2, max_norm=0.0)
    loss = SftLoss(aux_loss_coef=100.0)
    seen = [engine.train(step_of(loss, n), make_samples()).metrics["aux_loss"] for n in range(15)]
    assert seen[-1] < seen[0]
    assert np.isfinite(seen).all()


class Alone:
    """A command channel of a learner with one rank."""

    def send(self, *_):
        return None


def start(engine, spec):
    return Conductor(engine, Alone()).start_run(StartRunRequest(request_id="r", spec=spec))


def test_a_run_that_cannot_have_it_is_refused_at_its_start(make_engine, tiny_moe_dir):
    spec = RunSpec(
        run_id="new",
        optimizer=OptimizerConfig(),
        schedule=ScheduleConfig(),
        with_router_loss=True,
    )
    with pytest.raises(ConfigError, match="no router"):
        start(make_engine(), spec)
    checkpointed = {"gradient_checkpointing": True, "gradient_checkpointing_reentrant": True}
    with pytest.raises(ConfigError, match="reentrant"):
        start(make_engine(model=tiny_moe_dir, **checkpointed), spec)
    assert start(make_engine(model=tiny_moe_dir), spec).optimizer_steps == 0


def test_a_step_with_it_needs_a_run_with_it(make_engine):
    conductor = Conductor(make_engine(), Alone())
    with pytest.raises(RequestError, match="not started with a router loss"):
        conductor.train(step_of(SftLoss(aux_loss_coef=0.1)), [make_samples()])

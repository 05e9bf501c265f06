"""Chunked log-probabilities against the plain formula, values and gradients."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from quartet.nn import LmHead, selective_logprobs, sequence_logprobs
from quartet.types import SequenceBatch

VECTORS = Path(__file__).parents[2] / "vectors" / "sft_and_logprobs.json"


def plain(hidden, weight, bias, targets, *, temperature=1.0, scale=1.0, softcap=None):
    """The formula written out, in float64."""
    logits = (hidden.double() @ weight.double().T + (0 if bias is None else bias.double())) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = (logits / temperature).log_softmax(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.5, 3.0)])
def test_values_and_gradients(temperature, with_bias, scale, softcap):
    torch.manual_seed(0)
    hidden = torch.randn(11, 6, requires_grad=True)
    weight = torch.randn(17, 6, requires_grad=True)
    bias = torch.randn(17, requires_grad=True) if with_bias else None
    targets = torch.randint(0, 17, (11,))
    head = LmHead(weight=weight, bias=bias, scale=scale, softcap=softcap)
    logprobs, entropy = selective_logprobs(
        hidden, head, targets, temperature=temperature, with_entropy=True, rows_per_chunk=4
    )
    expected = plain(
        hidden, weight, bias, targets, temperature=temperature, scale=scale, softcap=softcap
    )
    torch.testing.assert_close(logprobs, expected[0].float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, expected[1].float(), rtol=1e-5, atol=1e-5)
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
    up = torch.randn(11), torch.randn(11)
    got = torch.autograd.grad((logprobs * up[0] + entropy * up[1]).sum(), leaves)
    want = torch.autograd.grad((expected[0] * up[0] + expected[1] * up[1]).sum(), leaves)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_vectors_of_the_incumbent():
    data = json.loads(VECTORS.read_text())
    logits = torch.tensor(data["inputs"]["logits"]).flatten(0, 1)
    targets = torch.tensor(data["inputs"]["labels"]).flatten()
    identity = LmHead(weight=torch.eye(logits.shape[-1]))
    for case in data["cases"][:2]:
        logprobs, _ = selective_logprobs(
            logits, identity, targets, temperature=case["params"]["temperature"]
        )
        expected = torch.tensor(case["expected"]["log_probs"]).flatten()
        torch.testing.assert_close(logprobs, expected, rtol=2e-6, atol=1e-7)


def test_an_entropy_nobody_uses_costs_no_gradient():
    hidden = torch.randn(3, 4, requires_grad=True)
    head = LmHead(weight=torch.randn(5, 4))
    logprobs, entropy = selective_logprobs(hidden, head, torch.tensor([0, 1, 2]), with_entropy=True)
    (with_entropy,) = torch.autograd.grad(logprobs.sum(), hidden)
    alone, _ = selective_logprobs(hidden, head, torch.tensor([0, 1, 2]))
    assert entropy is not None
    torch.testing.assert_close(
        with_entropy, torch.autograd.grad(alone.sum(), hidden)[0], rtol=0, atol=0
    )


def test_no_rows_give_zero_gradients():
    hidden = torch.zeros(0, 4, requires_grad=True)
    weight = torch.randn(5, 4, requires_grad=True)
    logprobs, _ = selective_logprobs(
        hidden, LmHead(weight=weight), torch.zeros(0, dtype=torch.long)
    )
    (gradient,) = torch.autograd.grad(logprobs.sum(), weight)
    assert gradient.shape == (5, 4)
    assert not gradient.any()


def test_half_precision_keeps_its_weight_gradient_over_many_chunks():
    torch.manual_seed(0)
    hidden = torch.randn(256, 8).bfloat16()
    weight = torch.randn(13, 8).bfloat16().requires_grad_()
    targets = torch.randint(0, 13, (256,))
    chunked, _ = selective_logprobs(hidden, LmHead(weight=weight), targets, rows_per_chunk=2)
    (got,) = torch.autograd.grad(chunked.sum(), weight)
    exact = weight.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(plain(hidden, exact, None, targets)[0].sum(), exact)
    assert (got.double() - want).abs().max() < 0.01 * want.abs().max()


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()


@pytest.mark.parametrize("packed", [False, True])
def test_sequences_padded_or_packed_are_as_one_by_one(model, packed):
    rows = [[5, 6, 7, 8, 9], [11], [40, 41, 42]]
    with torch.no_grad():
        flat, entropy = sequence_logprobs(
            model, SequenceBatch.of(rows), temperature=0.7, packed=packed, with_entropy=True
        )
        at = 0
        for row in rows:
            logits = model(torch.tensor([row])).logits[0] / 0.7
            log_p = logits.log_softmax(-1)
            mine = flat[at : at + len(row)]
            assert mine[0] == 0
            for t in range(1, len(row)):
                assert mine[t].item() == pytest.approx(log_p[t - 1, row[t]].item(), abs=1e-5)
                h = -(log_p[t - 1].exp() * log_p[t - 1]).sum().item()
                assert entropy[at + t].item() == pytest.approx(h, abs=1e-5)
            at += len(row)


@pytest.mark.parametrize("rows_per_chunk", [3, 100], ids=["chunks", "one chunk"])
def test_a_second_backward_pass_gives_the_same(rows_per_chunk):
    """The first one overwrites the logits that the forward pass left."""
    torch.manual_seed(0)
    hidden = torch.randn(7, 8, requires_grad=True)
    weight = torch.randn(11, 8, requires_grad=True)
    targets = torch.arange(7)
    logprobs, entropy = selective_logprobs(
        hidden,
        LmHead(weight=weight, softcap=5.0),
        targets,
        temperature=0.7,
        with_entropy=True,
        rows_per_chunk=rows_per_chunk,
    )
    loss = logprobs.sum() + 0.1 * entropy.sum()
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-7)

"""The sampler against an independent expression in numpy, one row at a time."""

import numpy as np
import pytest
import torch
from quartet_rollout.engines.transformers.sampler import (
    SamplingTensors,
    choose,
    processed_logits,
    sample,
    uniform,
    uniforms,
)

SETTINGS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.7},
    {"top_p": 0.9},
    {"top_p": 1e-6},
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 10**9},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 30},
]


def tensors(*rows, vocabulary=200):
    full = [
        {"temperature": 1.0, "top_p": 1.0, "top_k": vocabulary, "is_raw": False} | r for r in rows
    ]
    return SamplingTensors(
        temperature=torch.tensor([r["temperature"] for r in full]),
        top_p=torch.tensor([r["top_p"] for r in full]),
        top_k=torch.tensor([min(r["top_k"], vocabulary) for r in full]),
        is_raw=torch.tensor([r["is_raw"] for r in full]),
    )


def probabilities(logits, temperature=1.0, top_p=1.0, top_k=None):
    """float64: sort, keep the k best, of those the best until p is reached, renormalise."""
    z = np.asarray(logits, np.float64) / temperature
    order = np.argsort(-z, kind="stable")
    keep = order[: len(z) if top_k is None else top_k]
    p = np.exp(z[keep] - z[keep].max())
    p /= p.sum()
    before = np.concatenate([[0.0], np.cumsum(p)[:-1]])
    keep = keep[(before < top_p) | (np.arange(len(keep)) == 0)]
    out = np.zeros(len(z))
    out[keep] = np.exp(z[keep] - z[keep].max())
    return out / out.sum()


def random_logits(rows=1, vocabulary=200, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocabulary, generator=generator) * 2


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_distribution_is_that_of_the_definition(setting):
    logits = random_logits(4)
    got = processed_logits(logits, tensors(*[setting] * 4)).softmax(-1).numpy()
    wanted = np.stack([probabilities(row, **setting) for row in logits.numpy()])
    np.testing.assert_allclose(got, wanted, atol=1e-6)
    assert ((got > 0) == (wanted > 0)).all()


def test_rows_with_different_settings_do_not_touch_one_another():
    logits = random_logits(len(SETTINGS))
    together = processed_logits(logits, tensors(*SETTINGS))
    for row, setting in enumerate(SETTINGS):
        alone = processed_logits(logits[row : row + 1], tensors(setting))
        assert torch.equal(together[row], alone[0]), setting


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_draws_follow_the_distribution(setting):
    """Inverting the distribution function at evenly spread points counts every token."""
    count = 20_000
    logits = random_logits(vocabulary=50)
    grid = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    processed = processed_logits(logits, tensors(setting, vocabulary=50)).expand(count, -1)
    drawn = choose(processed, torch.ones(count), grid)
    share = np.bincount(drawn.numpy(), minlength=50) / count
    np.testing.assert_allclose(share, probabilities(logits[0].numpy(), **setting), atol=1.5 / count)


def test_a_dropped_token_is_never_drawn_at_the_ends():
    logits = torch.tensor([[-9.0, 1.0, 2.0, -9.0]])
    processed = processed_logits(logits, tensors({"top_k": 2}, vocabulary=4)).expand(2, -1)
    ends = torch.tensor([1e-17, 1 - 1e-16], dtype=torch.float64)
    assert choose(processed, torch.ones(2), ends).tolist() == [1, 2]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_logprobs_are_of_the_kind_asked_for(setting):
    logits = random_logits(64, seed=3)
    noise = uniforms([(seed, 0) for seed in range(64)], "cpu")
    got = sample(logits, tensors(*[setting] * 64), noise)
    raw = sample(logits, tensors(*[setting | {"is_raw": True}] * 64), noise)
    assert torch.equal(got.tokens, raw.tokens)
    for row in range(64):
        token = int(got.tokens[row])
        processed = np.log(probabilities(logits[row].numpy(), **setting)[token])
        plain = np.log(probabilities(logits[row].numpy())[token])
        assert abs(float(got.logprobs[row]) - processed) < 1e-5
        assert abs(float(raw.logprobs[row]) - plain) < 1e-5


def test_temperature_zero_is_greedy_with_a_point_mass():
    logits = random_logits(5)
    noise = torch.full((5,), 0.999, dtype=torch.float64)
    got = sample(logits, tensors(*[{"temperature": 0.0}] * 5), noise)
    assert torch.equal(got.tokens, logits.argmax(-1))
    assert got.logprobs.tolist() == [0.0] * 5


def test_a_banned_token_is_not_drawn_and_leaves_the_logprob_of_the_others_alone():
    logits = random_logits(32, vocabulary=20, seed=5)
    banned = torch.zeros(32, 20, dtype=torch.bool)
    banned[:, logits.mean(0).argmax()] = True
    noise = uniforms([(seed, 1) for seed in range(32)], "cpu")
    got = sample(logits, tensors(*[{"temperature": 0.7}] * 32, vocabulary=20), noise, banned)
    assert not banned.gather(-1, got.tokens[:, None]).any()
    open_logprobs = (logits / 0.7).log_softmax(-1).gather(-1, got.tokens[:, None]).squeeze(-1)
    torch.testing.assert_close(got.logprobs, open_logprobs, atol=1e-5, rtol=0)


def test_a_token_let_in_by_a_ban_has_a_finite_logprob():
    logits = torch.tensor([[5.0, 1.0, 0.0]])
    banned = torch.tensor([[True, False, False]])
    noise = torch.tensor([0.5], dtype=torch.float64)
    got = sample(logits, tensors({"top_k": 1}, vocabulary=3), noise, banned)
    assert got.tokens.tolist() == [1]
    # Kept are then token 0, by top-k, and token 1, by the ban.
    assert float(got.logprobs) == pytest.approx(-np.log(1 + np.exp(4.0)), abs=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_logit_that_is_no_number_concerns_its_row_only(bad):
    logits = random_logits(3)
    clean = sample(logits.clone(), tensors(*[{}] * 3), uniforms([(1, 0)] * 3, "cpu"))
    logits[1, 7] = bad
    got = sample(logits, tensors(*[{}] * 3), uniforms([(1, 0)] * 3, "cpu"))
    assert got.is_finite.tolist() == [True, False, True]
    assert torch.equal(got.tokens[::2], clean.tokens[::2])
    assert torch.equal(got.logprobs[::2], clean.logprobs[::2])


def test_nothing_left_to_draw_is_not_finite():
    logits = torch.full((1, 3), -float("inf"))
    assert not sample(logits, tensors({}, vocabulary=3), uniforms([(0, 0)], "cpu")).is_finite
    everything = torch.ones(1, 3, dtype=torch.bool)
    noise = uniforms([(0, 0)], "cpu")
    got = sample(torch.zeros(1, 3), tensors({}, vocabulary=3), noise, everything)
    assert not got.is_finite


def test_noise_is_a_function_of_seed_and_place():
    assert uniform(1, 2) == uniform(1, 2)
    assert len({uniform(s, p) for s in range(50) for p in range(50)}) == 2500
    assert uniform(2**64 - 1, 0) != uniform(0, 0)
    numbers = np.array([uniform(s, p) for s in range(100) for p in range(100)])
    assert 0 < numbers.min() < 0.001
    assert 0.999 < numbers.max() < 1
    # Kolmogorov-Smirnov at the 0.1 % level, and neighbours that know nothing of one another.
    expected = (np.arange(len(numbers)) + 0.5) / len(numbers)
    assert np.abs(np.sort(numbers) - expected).max() < 1.95 / np.sqrt(len(numbers))
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.04

"""From logits to tokens. Pure functions of tensors, without state and without a generator.

Randomness comes in as one number in (0, 1) a token, a hash of the sample's seed and the token's
place: what a sample draws depends on nothing but those two, whoever its neighbours are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SamplingTensors:
    """How to sample each of B rows."""

    temperature: torch.Tensor  # [B] float32
    """0 is greedy."""
    top_p: torch.Tensor  # [B] float32, in (0, 1]
    top_k: torch.Tensor  # [B] int64, vocabulary size where all are kept
    is_raw: torch.Tensor  # [B] bool
    """Report log_softmax(logits) in place of the distribution sampled from."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sampled:
    """One token a row."""

    tokens: torch.Tensor  # [B] int64
    logprobs: torch.Tensor  # [B] float32
    is_finite: torch.Tensor  # [B] bool
    """False where the logits were not numbers; token and logprob then mean nothing."""


def uniform(seed: int, place: int) -> float:
    """A number in (0, 1), 53 bits of BLAKE2b over seed and place of a token in its completion."""
    message = seed.to_bytes(8, "little") + place.to_bytes(8, "little")
    bits = int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little")
    return ((bits >> 11) + 0.5) / (1 << 53)


def uniforms(draws: Sequence[tuple[int, int]], device: torch.device | str) -> torch.Tensor:
    """[B] float64 of `uniform` over (seed, place)."""
    numbers = [uniform(seed, place) for seed, place in draws]
    return torch.tensor(numbers, dtype=torch.float64, device=device)


def processed_logits(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """Logits after temperature, top-k and top-p, in this order; dropped tokens are -inf.

    Top-p keeps the most likely tokens until their mass reaches p, at least one. Ties at the border
    of top-k are all kept. Rows of temperature 0 keep their logits.

    Args:
        logits: [B, V] float32.
        params: How to sample each row.

    Returns:
        [B, V] float32.
    """
    greedy = params.temperature == 0
    scaled = logits / torch.where(greedy, 1.0, params.temperature)[:, None]
    vocabulary = logits.shape[-1]
    cut_k = (params.top_k < vocabulary) & ~greedy
    cut_p = (params.top_p < 1.0) & ~greedy
    if bool(cut_k.any()):
        largest = int(params.top_k[cut_k].max())
        best = scaled.topk(largest, dim=-1).values
        last = best.gather(-1, (params.top_k.clamp(max=largest) - 1)[:, None])
        scaled = torch.where(cut_k[:, None] & (scaled < last), -torch.inf, scaled)
    if bool(cut_p.any()):
        ordered, index = scaled.sort(dim=-1, descending=True, stable=True)
        mass = ordered.softmax(-1).cumsum(-1)
        # A token goes when those before it already have the mass.
        drop = mass.roll(1, dims=-1) >= params.top_p[:, None]
        drop[:, 0] = False
        drop &= cut_p[:, None]
        scaled = scaled.masked_fill(torch.empty_like(drop).scatter_(-1, index, drop), -torch.inf)
    return scaled


def choose(processed: torch.Tensor, temperature: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Draw a token from each row by inverting its distribution function.

    Args:
        processed: [B, V] processed logits.
        temperature: [B]; 0 takes the most likely token, the first of equals.
        noise: [B] float64 in (0, 1).

    Returns:
        [B] int64.
    """
    probabilities = processed.softmax(-1)
    # float64: over 100 thousand tokens a float32 sum is off by more than the rarest of them.
    reached = probabilities.double().cumsum(-1)
    target = noise[:, None] * reached[:, -1:]
    drawn = torch.searchsorted(reached, target, right=True).squeeze(-1)
    drawn = drawn.clamp(max=processed.shape[-1] - 1)
    return torch.where(temperature == 0, processed.argmax(-1), drawn)


def sample(
    logits: torch.Tensor,
    params: SamplingTensors,
    noise: torch.Tensor,
    banned: torch.Tensor | None = None,
) -> Sampled:
    """Sample one token a row and report its log-probability.

    Args:
        logits: [B, V] as the model gives them.
        params: How to sample each row.
        noise: [B] float64 in (0, 1).
        banned: [B, V] bool, tokens that may not be sampled now (stop tokens before
            min_new_tokens), or None. The log-probability leaves the ban out: a learner that knows
            nothing of it computes the same number.
    """
    logits = logits.float()
    # The maximum is NaN or infinite if any logit is NaN or +inf, or all are -inf.
    is_finite = logits.amax(-1).isfinite()
    logits = torch.where(is_finite[:, None], logits, 0.0)
    open_logits = processed_logits(logits, params)
    allowed = open_logits
    if banned is not None:
        allowed = processed_logits(logits.masked_fill(banned, -torch.inf), params)
        is_finite = is_finite & allowed.amax(-1).isfinite()
        allowed = torch.where(is_finite[:, None], allowed, 0.0)
    tokens = choose(allowed, params.temperature, noise)
    logprobs = _logprob(logits, open_logits, allowed, tokens, params)
    return Sampled(tokens=tokens, logprobs=logprobs, is_finite=is_finite)


def _logprob(
    logits: torch.Tensor,
    open_logits: torch.Tensor,
    allowed: torch.Tensor,
    tokens: torch.Tensor,
    params: SamplingTensors,
) -> torch.Tensor:
    picked = tokens[:, None]
    raw = (logits.gather(-1, picked) - logits.logsumexp(-1, keepdim=True)).squeeze(-1)
    chosen = allowed.gather(-1, picked).squeeze(-1)
    total = open_logits.logsumexp(-1)
    # A ban can let a token in that top-k or top-p would have dropped: then it counts as kept.
    was_dropped = open_logits.gather(-1, picked).squeeze(-1) == -torch.inf
    total = torch.where(was_dropped, torch.logaddexp(total, chosen), total)
    # Greedy draws from a distribution of one token.
    processed = torch.where(params.temperature == 0, 0.0, chosen - total)
    return torch.where(params.is_raw, raw, processed)

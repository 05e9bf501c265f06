"""The imaginary model behind the fakes: every number is a simple function of token and version.

`version` counts optimizer steps: each makes every token a little likelier, so that a policy moves
away from its reference, and comes back in line with the rollout engine after a push.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from quartet.types import SamplingParams, SequenceBatch

VOCABULARY = 64
"""Token ids are below this."""
EOS = 0
"""The token that ends a completion."""
DEFAULT_LENGTH = 16
"""Tokens of a completion when nobody says how many, the context leaving so much."""
STEP = np.float32(0.01)
"""What one optimizer step adds to every log-probability."""


def logprobs(batch: SequenceBatch, version: float, temperature: float = 1.0) -> NDArray[np.float32]:
    """[N] log-probabilities: about -2 / temperature, 0 for each sequence's first token."""
    flat = -(2.0 + (batch.token_ids % 7).astype(np.float32) / 10) / np.float32(temperature)
    flat = (flat + STEP * version).astype(np.float32)
    flat[batch.offsets[:-1]] = 0
    return flat


def entropies(batch: SequenceBatch) -> NDArray[np.float32]:
    """[N] entropies: 1 nat, 0 for each sequence's first token."""
    flat = np.ones(batch.num_tokens, np.float32)
    flat[batch.offsets[:-1]] = 0
    return flat


def values(batch: SequenceBatch, version: int) -> NDArray[np.float32]:
    """[N] values before each token is chosen, 0 for each sequence's first token."""
    flat = ((batch.token_ids % 5).astype(np.float32) / 10 + STEP * version).astype(np.float32)
    flat[batch.offsets[:-1]] = 0
    return flat


def rewards(batch: SequenceBatch, version: int) -> NDArray[np.float32]:
    """[B] rewards: the mean token of each sequence over VOCABULARY."""
    sums = np.add.reduceat(batch.token_ids, batch.offsets[:-1])
    return (sums / batch.lengths / VOCABULARY + STEP * version).astype(np.float32)


def sample(prompt: tuple[int, ...], seed: int, sampling: SamplingParams) -> NDArray[np.int32]:
    """Tokens of one completion, by prompt and seed alone, under the limits of `sampling`."""
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {EOS})
    limit = sampling.max_new_tokens or DEFAULT_LENGTH
    key = f"{prompt}:{seed}".encode()
    tokens: list[int] = []
    while len(tokens) < limit:
        digest = hashlib.sha256(key + len(tokens).to_bytes(4, "little")).digest()
        token = digest[0] % VOCABULARY
        while token in stops and len(tokens) < sampling.min_new_tokens:
            token = (token + 1) % VOCABULARY
        tokens.append(token)
        if token in stops:
            break
    return np.array(tokens, np.int32)

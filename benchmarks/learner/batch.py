"""The batch that all contenders train on, and how those that pad cut it. numpy only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

PROMPT_TOKENS = (16, 64)
"""Shortest and longest prompt; uniform between."""
MEDIAN_COMPLETION = 96
COMPLETION_SIGMA = 0.9
"""Of the logarithm of the length: the mean is 1.5 times the median, one in ten 3 times."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Sequences of one optimizer step, end to end."""

    token_ids: NDArray[np.int64]
    """[N]."""
    lengths: NDArray[np.int64]
    """[B]."""
    trained: NDArray[np.bool_]
    """[N]: completions, which the loss is over."""

    @property
    def num_trained(self) -> int:
        """Tokens in the loss."""
        return int(self.trained.sum())

    def rows(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
        """Ids and loss mask of each sequence."""
        bounds = np.cumsum(self.lengths)[:-1]
        yield from zip(
            np.split(self.token_ids, bounds), np.split(self.trained, bounds), strict=True
        )

    def save(self, file: Path) -> None:
        """Write an npz file."""
        np.savez(file, token_ids=self.token_ids, lengths=self.lengths, trained=self.trained)

    @classmethod
    def load(cls, file: Path) -> Batch:
        """Read what `save` wrote."""
        with np.load(file) as stored:
            return cls(**{name: stored[name] for name in stored.files})


def make_batch(num_tokens: int, *, longest: int, vocabulary: int, seed: int = 0) -> Batch:
    """Prompts of even and completions of log-normal lengths, as a policy's answers have.

    Args:
        num_tokens: of all sequences together, or a little more.
        longest: no sequence is longer; longer completions are cut, as they are in sampling.
        vocabulary: token ids below this; random, for they do not change the cost.
        seed: the same gives the same batch.
    """
    random = np.random.default_rng(seed)
    prompts: list[int] = []
    lengths: list[int] = []
    while sum(lengths) < num_tokens:
        prompt = int(random.integers(PROMPT_TOKENS[0], PROMPT_TOKENS[1] + 1))
        drawn = random.lognormal(np.log(MEDIAN_COMPLETION), COMPLETION_SIGMA)
        prompts.append(min(prompt, longest - 1))
        lengths.append(min(prompts[-1] + max(1, int(drawn)), longest))
    trained = [np.arange(n) >= p for p, n in zip(prompts, lengths, strict=True)]
    return Batch(
        token_ids=random.integers(3, vocabulary, sum(lengths)),
        lengths=np.array(lengths),
        trained=np.concatenate(trained),
    )


def small_batch(count: int, *, vocabulary: int) -> Batch:
    """`count` sequences of four tokens: the step that warms up."""
    random = np.random.default_rng(1)
    return Batch(
        token_ids=random.integers(3, vocabulary, 4 * count),
        lengths=np.full(count, 4),
        trained=np.tile([False, True, True, True], count),
    )


def cut_padded(lengths: Sequence[int], budget: int, *, ordered: bool = True) -> list[list[int]]:
    """Micro-batches of at most `budget` tokens, padding included.

    Args:
        lengths: of the sequences.
        budget: at least the longest of them.
        ordered: long ones first, so that neighbours in length share a micro-batch, which is the
            best that padding can do; else in the order given, as a plain data loader does.
    """
    numbers = range(len(lengths))
    order = sorted(numbers, key=lambda i: -lengths[i]) if ordered else list(numbers)
    batches: list[list[int]] = []
    for number in order:
        joined = [*batches[-1], number] if batches else []
        if joined and max(lengths[i] for i in joined) * len(joined) <= budget:
            batches[-1] = joined
        else:
            batches.append([number])
    return batches

"""The demo's data and its gold metric.

* SFT: short sentences with positive, neutral and negative adjectives in equal shares.
* Pairs: two completions of a prompt, the one with the higher lexicon score first.
* PPO: prompts. Measurement: prompts of their own.
* Gold metric: the lexicon's compound score in [-1, 1] of a completion. No stage is given it: the
  reward model sees which of two texts is better, never by how much, and PPO sees the reward model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from quartet.demo.words import NEGATIVE, NEUTRAL, NOUNS, POSITIVE, TEMPLATES

Random = np.random.Generator
T = TypeVar("T")

NUM_SENTENCES = 6000
NUM_PAIRS = 6000
NUM_PROMPTS = 2048
NUM_HELD_OUT_PAIRS = 500
NUM_HELD_OUT_PROMPTS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskFiles:
    """Where the data lies; every file is JSON lines."""

    sft: Path
    """Columns prompt, completion."""
    pairs: Path
    """Columns prompt, chosen, rejected."""
    prompts: Path
    """Column prompt."""
    held_out_pairs: Path
    """Columns as those of `pairs`; they give the reward model's accuracy, and its mean and std."""
    held_out_prompts: Path
    """Column prompt; for measuring, never for training."""


def sentiment(text: str) -> float:
    """Lexicon score of a text: -1 is the most negative, 1 the most positive, 0 neither."""
    return _score()(text)


@lru_cache(maxsize=1)
def _score() -> Callable[[str], float]:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    analyzer = SentimentIntensityAnalyzer()
    return lambda text: float(analyzer.polarity_scores(text)["compound"])


def write_task(folder: Path, *, seed: int = 0) -> TaskFiles:
    """Write all data of the demo; the same seed gives the same files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = TaskFiles(**{name: folder / f"{name}.jsonl" for name in TaskFiles.__slots__})
    rows = {
        files.sft: sentences(_random(seed, 0), NUM_SENTENCES),
        files.pairs: pairs(_random(seed, 1), NUM_PAIRS),
        files.prompts: prompts(_random(seed, 2), NUM_PROMPTS),
        files.held_out_pairs: pairs(_random(seed, 3), NUM_HELD_OUT_PAIRS),
        files.held_out_prompts: prompts(_random(seed, 4), NUM_HELD_OUT_PROMPTS),
    }
    for path, content in rows.items():
        text = "".join(json.dumps(row) + "\n" for row in content)
        path.write_text(text, encoding="utf-8")
    return files


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _random(seed: int, stream: int) -> Random:
    return np.random.default_rng([seed, stream])


def sentences(random: Random, count: int) -> Iterator[Mapping[str, str]]:
    """Prompts and completions of the SFT corpus."""
    for _ in range(count):
        prompt, completion = _draw(TEMPLATES, random)
        yield {"prompt": _fill(prompt, random), "completion": _fill(completion, random)}


def prompts(random: Random, count: int) -> Iterator[Mapping[str, str]]:
    """Beginnings of sentences."""
    for row in sentences(random, count):
        yield {"prompt": row["prompt"]}


def pairs(random: Random, count: int) -> Iterator[Mapping[str, str]]:
    """Two completions of one prompt; ties are drawn again."""
    made = 0
    while made < count:
        before, after = _draw(TEMPLATES, random)
        prompt = _fill(before, random)
        ranked = sorted((_fill(after, random) for _ in range(2)), key=sentiment)
        if sentiment(ranked[0]) < sentiment(ranked[1]):
            yield {"prompt": prompt, "chosen": ranked[1], "rejected": ranked[0]}
            made += 1


def _fill(template: str, random: Random) -> str:
    """Put a random word into each slot."""
    words = []
    for word in template.split(" "):
        if word == "{n}":
            word = _draw(NOUNS, random)
        elif word == "{a}":
            word = _draw(_draw((POSITIVE, NEUTRAL, NEGATIVE), random), random)
        words.append(word)
    return " ".join(words)


def _draw(options: Sequence[T], random: Random) -> T:
    return options[int(random.integers(len(options)))]

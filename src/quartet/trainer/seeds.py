"""Names and seeds of samples: functions of what a sample is, never of when or where it is made."""

from __future__ import annotations

import hashlib

import numpy as np


def sample_id(*, episode: int, prompt_id: str, index: int) -> str:
    """Name of a sample, unique in a run."""
    return f"{episode}/{prompt_id}/{index}"


def sample_seed(*, run_seed: int, episode: int, prompt_id: str, index: int) -> int:
    """Unsigned 64-bit seed of a sample, from the run's seed and the sample's name.

    The first 8 bytes of a SHA-256: who generates a sample, and when, does not change its seed, and
    neighbouring names have unrelated seeds.
    """
    return _seed(f"{run_seed}|{sample_id(episode=episode, prompt_id=prompt_id, index=index)}")


def turn_seed(sample: int, turn: int) -> int:
    """Unsigned 64-bit seed of a turn of an agent's episode, from that of its sample."""
    return sample if turn == 0 else _seed(f"{sample}|turn/{turn}")


def evaluation_seed(*, run_seed: int, prompt_id: str, index: int) -> int:
    """Unsigned 64-bit seed of a sample of an evaluation; the same in all evaluations of a run."""
    return _seed(f"{run_seed}|eval/{prompt_id}/{index}")


def _seed(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def generator(run_seed: int, *path: int | str) -> np.random.Generator:
    """A random generator for one purpose, for example `generator(42, "order", episode)`."""
    text = "|".join(str(part) for part in (run_seed, *path))
    digest = hashlib.sha256(text.encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "little"))

"""How many samples local data files hold, as far as it can be seen without loading them."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_JSON_LIMIT_BYTES = 64 * 2**20
"""A larger .json file is not read just to be counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """What is known of the data before it is loaded."""

    size: int | None = None
    """Samples; None where it is not known."""
    why: str = ""
    """Why it is not known."""


def count_datasets(names: Sequence[str], max_samples: int) -> Dataset:
    """Count samples of data sets laid one after the other.

    Args:
        names: as in `data.dataset`.
        max_samples: cap for each and for all.
    """
    total = 0
    for name in names:
        counted = _count(name)
        if counted.size is None:
            return counted
        total += min(counted.size, max_samples)
    return Dataset(size=min(total, max_samples))


def _count(name: str) -> Dataset:
    path = Path(name.partition("@")[0]).expanduser()
    if not path.exists():
        return Dataset(why=f"{name} is not on this machine")
    if path.is_dir():
        return Dataset(why=f"{name} is a folder")
    try:
        match path.suffix:
            case ".jsonl":
                return Dataset(size=_lines(path))
            case ".json":
                return _json(path)
            case ".csv":
                with path.open(newline="", encoding="utf-8") as file:
                    return Dataset(size=max(sum(1 for _ in csv.reader(file)) - 1, 0))
    except (OSError, ValueError) as error:
        return Dataset(why=f"{name} cannot be read ({error})")
    return Dataset(why=f"{name} is counted by its loader")


def _lines(path: Path) -> int:
    """Lines that are not empty."""
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())


def _json(path: Path) -> Dataset:
    """Entries of a JSON list; line-delimited JSON is common under this name too."""
    if path.stat().st_size > _JSON_LIMIT_BYTES:
        return Dataset(why=f"{path} is too large to be counted")
    text = path.read_text(encoding="utf-8")
    try:
        content = json.loads(text)
    except ValueError:
        return Dataset(size=sum(1 for line in text.splitlines() if line.strip()))
    if isinstance(content, list):
        return Dataset(size=len(content))
    return Dataset(why=f"{path} is no list")

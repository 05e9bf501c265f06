"""Rewards that are a weighted sum: what `--reward.parts WEIGHT:SOURCE ...` says."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from quartet.config.models import RewardSourceFields
from quartet.config.tree import wrong
from quartet.errors import ConfigError

FLAG = "reward.parts"

SourceKind = Literal["math", "model", "function", "http"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardPart:
    """One source of rewards and its weight in the sum."""

    weight: float
    kind: SourceKind
    target: str
    """Model, path or URL; empty for a built-in verifier."""
    name: str
    """Unique among the parts: `reward_<name>` among the extra logs is what it gave."""


def parse_parts(texts: Sequence[str]) -> list[RewardPart]:
    """Read all parts.

    Raises:
        ConfigError: one is not WEIGHT:SOURCE.
    """
    parts: list[RewardPart] = []
    for text in texts:
        weight, kind, target = _parse(text)
        stem = _stem(kind, target)
        same = sum(1 for part in parts if part.name == stem or part.name.startswith(f"{stem}_"))
        name = stem if not same else f"{stem}_{same + 1}"
        parts.append(RewardPart(weight=weight, kind=kind, target=target, name=name))
    return parts


def reward_source(source: RewardSourceFields) -> str:
    """What rewards come from, in words for a plan."""
    summed = " + ".join(text.replace(":", " ", 1) for text in source.parts)
    return summed or str(source.model_name_or_path or source.remote_url)


def check_parts(texts: Sequence[str]) -> Iterator[ConfigError]:
    """The error of each part that cannot be read, and of a sum that is nothing."""
    weights: list[float] = []
    for text in texts:
        try:
            weights.append(_parse(text)[0])
        except ConfigError as error:
            yield error
    if texts and len(weights) == len(texts) and not any(weights):
        yield wrong(FLAG, " ".join(texts), "all weights are 0", "give one of them another weight")


def targets_of(texts: Sequence[str], kind: SourceKind) -> list[str]:
    """The targets of the readable parts of one kind; `check_parts` tells of the others."""
    found: list[str] = []
    for text in texts:
        with contextlib.suppress(ConfigError):
            _, each, target = _parse(text)
            found += [target] if each == kind else []
    return found


def _parse(text: str) -> tuple[float, SourceKind, str]:
    number, colon, source = text.partition(":")
    weight = _weight(number)
    if not colon or weight is None or not source:
        raise wrong(FLAG, text, "is not WEIGHT:SOURCE", "write 0.8:math, or 0.2:format.py")
    if source == "math":
        return weight, "math", ""
    if source.startswith("model:") and source != "model:":
        return weight, "model", source.removeprefix("model:")
    if source.endswith(".py"):
        return weight, "function", source
    if source.startswith(("http://", "https://")):
        return weight, "http", source
    raise wrong(
        FLAG,
        text,
        f"{source} is no source of rewards",
        "take math, model:FOLDER_OR_NAME, a path that ends in .py, or an http(s) URL",
    )


def _weight(number: str) -> float | None:
    try:
        weight = float(number)
    except ValueError:
        return None
    return weight if math.isfinite(weight) else None


def _stem(kind: SourceKind, target: str) -> str:
    """What a reader of metrics knows the part by."""
    if kind == "math":
        return "math"
    place = urlsplit(target).hostname if kind == "http" else Path(target.rstrip("/")).stem
    return re.sub(r"[^0-9A-Za-z_.-]", "_", place or kind)

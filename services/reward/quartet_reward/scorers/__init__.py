"""The scorers, by name. A new one is a file here and a line in `SCORERS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from quartet.config import RewardServeConfig
from quartet.config.rewardparts import RewardPart, parse_parts
from quartet.errors import ConfigError
from quartet_reward.scorer import Scorer


def make_scorer(config: RewardServeConfig) -> Scorer:
    """Build the scorer that the configuration asks for, without loading anything yet.

    Raises:
        ConfigError: it asks for none, or for two.
    """
    return SCORERS[scorer_kind(config)](config)


def scorer_kind(config: RewardServeConfig) -> str:
    """Name of the scorer: parts are added up, a `.py` path is a function, other URLs are http."""
    source = config.reward
    if source.parts:
        return "composite"
    if source.remote_url and source.model_name_or_path:
        raise ConfigError(
            "reward.remote_url and reward.model_name_or_path are both given",
            field="reward.remote_url",
            value=source.remote_url,
            remedy="give one of them",
        )
    if source.remote_url:
        return "function" if source.remote_url.endswith(".py") else "http"
    if source.model_name_or_path:
        return "model"
    raise ConfigError(
        "there is nothing to score with",
        field="reward.remote_url",
        remedy="give --reward.remote_url FILE.py or URL, --reward.model_name_or_path MODEL, or "
        "--reward.parts 1:math",
    )


def _function(config: RewardServeConfig) -> Scorer:
    from quartet_reward.scorers.function import FunctionScorer

    return FunctionScorer(
        config.reward.remote_url or "",
        num_workers=config.reward.num_workers,
        batch_size=config.batch_size or 1,
        time_limit=config.reward.timeout,
    )


def _http(config: RewardServeConfig) -> Scorer:
    from quartet_reward.scorers.http import HttpScorer

    return HttpScorer(
        [url for url in (config.reward.remote_url or "").split(",") if url.strip()],
        timeout=config.reward.timeout,
        max_attempts=config.reward.max_attempts,
        batch_size=config.batch_size or 1,
    )


def _model(config: RewardServeConfig) -> Scorer:
    from quartet_reward.scorers.model import ModelScorer

    return ModelScorer(
        config.reward.model_name_or_path or "",
        config.ds,
        max_len=config.data.max_len,
        batch_size=config.batch_size,
        normalize=config.reward.normalize_enable,
        offload=config.reward.offload,
        use_fast_tokenizer=not config.data.disable_fast_tokenizer,
    )


def _composite(config: RewardServeConfig) -> Scorer:
    from quartet_reward.scorers.composite import CompositeScorer, Part

    return CompositeScorer(
        [
            Part(name=part.name, weight=part.weight, scorer=_part(config, part))
            for part in parse_parts(config.reward.parts)
        ]
    )


def _part(config: RewardServeConfig, part: RewardPart) -> Scorer:
    """One term of a sum, with the settings of all."""
    alone = replace(config.reward, parts=(), model_name_or_path=None, remote_url=None)
    if part.kind == "model":
        alone = replace(alone, model_name_or_path=part.target)
    else:
        alone = replace(alone, remote_url=part.target or str(VERIFIERS[part.kind]))
    return make_scorer(replace(config, reward=alone))


VERIFIERS = {"math": Path(__file__).parent.parent / "verifiers" / "math_answer.py"}
"""Reward files that come with the service."""

SCORERS: dict[str, Callable[[RewardServeConfig], Scorer]] = {
    "composite": _composite,
    "function": _function,
    "http": _http,
    "model": _model,
}

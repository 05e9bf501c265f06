"""What goes to a reward service and what comes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why there is no result for one sample. Mirrors ErrorDetail in the contract."""

    error_class: str
    """INFRA, DATA, REQUEST or FATAL."""
    reason: str
    """Stable UPPER_SNAKE_CASE name."""
    message: str
    """One sentence for a person."""
    replica: str = ""
    """The server that says so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreItem:
    """One completion to score."""

    sample_id: str
    prompt: str
    """Prompt as rendered, chat template included."""
    query: str
    """Prompt and completion, decoded with special tokens kept."""
    label: Any = ""
    """What the dataset says of this prompt; any JSON value."""
    token_ids: tuple[int, ...] = ()
    """Prompt and completion as tokens, for scorers that share the policy's tokenizer."""
    prompt_length: int = 0
    """How many of token_ids belong to the prompt."""
    truncated: bool = False
    """True when the completion was cut by its length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    """A score. All numbers are finite."""

    reward: float
    """The number to train on."""
    score: float
    """The number to filter and evaluate by."""
    extra_logs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreResult:
    """The outcome for one sample: a reward or a failure."""

    sample_id: str
    outcome: Reward | Failure


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreBatch:
    """Answer of one Score call, in the order of the items."""

    results: tuple[ScoreResult, ...]
    replica: str = ""
    server_version: str = ""
    digest: str = ""
    """Digest of the model or of the file that scored."""

"""What goes to a rollout engine and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from quartet.types.reward import Failure


class LogprobKind(StrEnum):
    """Over which distribution log-probabilities were taken."""

    RAW = "raw"
    """log_softmax(logits)."""
    PROCESSED = "processed"
    """Of the distribution sampled from: after temperature, top-p and top-k."""


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


class ReplicaState(StrEnum):
    """State of a rollout replica."""

    STARTING = "starting"
    STALE = "stale"
    SERVING = "serving"
    ASLEEP = "asleep"
    DRAINING = "draining"


class PauseMode(StrEnum):
    """What becomes of running completions at a pause."""

    KEEP = "keep"
    ABORT = "abort"
    DRAIN = "drain"


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobSpec:
    """The behaviour distribution of some log-probabilities."""

    kind: LogprobKind
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to sample."""

    temperature: float = 1.0
    """Divisor of the logits; 0 is greedy."""
    top_p: float = 1.0
    """Nucleus mass to keep, in (0, 1]."""
    top_k: int = -1
    """Tokens to keep; -1 keeps all."""
    max_new_tokens: int | None = None
    """Most tokens of a completion; None is what the context leaves."""
    min_new_tokens: int = 1
    """Fewest tokens before a stop token may be sampled."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion, beside the model's own end token."""
    ignore_eos: bool = False
    """Do not stop at the model's own end token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptGroup:
    """One prompt and the samples wanted of it."""

    group_id: str
    prompt_token_ids: tuple[int, ...]
    num_samples: int = 1
    seeds: tuple[int, ...] = ()
    """One unsigned 64-bit seed a sample, or none."""
    sample_ids: tuple[str, ...] = ()
    """One name a sample, or none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionSpan:
    """Tokens start to end (exclusive) of a completion and the weights that made them."""

    policy_version: int
    start: int
    end: int


def _no_tokens() -> NDArray[np.int32]:
    return np.zeros(0, np.int32)


def _no_logprobs() -> NDArray[np.float32]:
    return np.zeros(0, np.float32)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Completion:
    """One sample, or why there is none."""

    sample_id: str = ""
    token_ids: NDArray[np.int32] = field(default_factory=_no_tokens)  # [T]
    """Sampled tokens, with the stop token that ended it."""
    logprobs: NDArray[np.float32] = field(default_factory=_no_logprobs)  # [T]
    """Log-probability of each sampled token."""
    finish_reason: FinishReason = FinishReason.STOP
    versions: tuple[VersionSpan, ...] = ()
    """Which weights made which tokens, in order, without gaps."""
    failure: Failure | None = None
    """Set when this sample failed; the fields above then hold nothing."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GroupCompletions:
    """The samples of one prompt, in the order of their seeds."""

    group_id: str
    completions: tuple[Completion, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GenerateResult:
    """Answer of one Generate call."""

    groups: tuple[GroupCompletions, ...]
    logprob_spec: LogprobSpec
    replica: str = ""
    queue_seconds: float = 0.0
    """Seconds between the arrival of the call and its first sampled token."""

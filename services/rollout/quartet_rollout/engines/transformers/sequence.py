"""One sample on its way through the engine."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from quartet.types import (
    Completion,
    Failure,
    FinishReason,
    LogprobKind,
    SamplingParams,
    VersionSpan,
)


@dataclass(kw_only=True, slots=True, eq=False)
class Sequence:
    """A prompt, what was sampled after it, and how to go on."""

    sample_id: str
    prompt: tuple[int, ...]
    seed: int
    sampling: SamplingParams
    logprob_kind: LogprobKind
    stop_ids: frozenset[int]
    """Tokens that end it, the model's own end tokens among them unless they are ignored."""
    max_tokens: int
    """Most tokens it may have: its own limit or what the context leaves."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    failure: Failure | None = None
    is_cancelled: bool = False

    @property
    def is_done(self) -> bool:
        """True when nothing more is sampled."""
        return self.finish_reason is not None or self.failure is not None or self.is_cancelled

    @property
    def must_go_on(self) -> bool:
        """True while a stop token may not be sampled yet."""
        return len(self.tokens) < self.sampling.min_new_tokens

    def all_tokens(self) -> Seq[int]:
        """Prompt and completion so far."""
        return (*self.prompt, *self.tokens)

    def take(self, token: int, logprob: float, policy_version: int) -> None:
        """Append a sampled token; may end the completion."""
        place = len(self.tokens)
        self.tokens.append(token)
        self.logprobs.append(logprob)
        last = self.versions[-1] if self.versions else None
        if last is not None and last.policy_version == policy_version:
            start = self.versions.pop().start
        else:
            start = place
        self.versions.append(VersionSpan(policy_version=policy_version, start=start, end=place + 1))
        if token in self.stop_ids:
            self.finish_reason = FinishReason.STOP
        elif len(self.tokens) >= self.max_tokens:
            self.finish_reason = FinishReason.LENGTH

    def abort(self) -> None:
        """End with the tokens so far."""
        self.finish_reason = FinishReason.ABORTED

    def completion(self) -> Completion:
        """The finished sample."""
        if self.failure is not None:
            return Completion(sample_id=self.sample_id, failure=self.failure)
        return Completion(
            sample_id=self.sample_id,
            token_ids=np.array(self.tokens, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            finish_reason=self.finish_reason or FinishReason.ABORTED,
            versions=tuple(self.versions),
        )

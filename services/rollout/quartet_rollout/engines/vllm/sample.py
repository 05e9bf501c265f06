"""One sample: what vLLM is asked for, and what its answers add up to. Imports no vLLM.

vLLM bans stop tokens before `min_tokens`, and the ban is in the log-probabilities that it reports
of the distribution sampled from. A learner knows nothing of it. So the ban is made by hand: a stop
token that comes too early is dropped and drawn again with another seed, which is the same
distribution of tokens, with log-probabilities that leave the ban out.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quartet.types import (
    Completion,
    Failure,
    FinishReason,
    LogprobKind,
    SamplingParams,
    VersionSpan,
)

MAX_DRAWS = 64
"""Times that a stop token may come too early at one place."""

_SEED_BITS = 63
"""vLLM's seeds are signed 64-bit numbers."""

_ONLY_FIRST_AND_LAST = 1 << 30
"""Tokens between two outputs: the first tells when generation began, the last has everything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What vLLM says when a request of it has ended."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Of `token_ids`."""
    finish_reason: str | None
    """stop, length, abort."""
    versions: Sequence[VersionSpan]
    """Over `token_ids`."""
    cached_tokens: int = 0
    """Tokens of the prompt that were not computed, because another request had them."""


@dataclass(kw_only=True, slots=True, eq=False)
class Sample:
    """A prompt, what was sampled after it, and how to go on."""

    sample_id: str
    prompt: tuple[int, ...]
    seed: int
    sampling: SamplingParams
    kind: LogprobKind
    """What the engine reports."""
    stop_ids: frozenset[int]
    """Tokens that end it, the model's own end tokens among them unless they are ignored."""
    max_tokens: int
    """Most tokens it may have."""
    shares_with: str = ""
    """The same for all samples of a prompt, and for no others."""
    isolated: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    failure: Failure | None = None
    draws: int = 0
    """Times that a stop token came too early."""
    began: float | None = None
    """Monotonic time of its first token."""
    is_counted_off: bool = False
    """No longer among the engine's completions in flight."""

    @property
    def is_done(self) -> bool:
        """True when vLLM has nothing more to do for it."""
        return self.finish_reason is not None or self.failure is not None

    @property
    def is_greedy(self) -> bool:
        """True when nothing is drawn."""
        return self.sampling.temperature == 0

    def all_tokens(self) -> list[int]:
        """Prompt and completion so far."""
        return [*self.prompt, *self.tokens]

    def parameters(self) -> dict[str, Any]:
        """Keyword arguments of vLLM's SamplingParams for what is left to do."""
        sampling = self.sampling
        bans_by_vllm = self.is_greedy or self.kind is LogprobKind.RAW
        missing = max(0, sampling.min_new_tokens - len(self.tokens))
        most = self.max_tokens - len(self.tokens)
        return {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": None if self.is_greedy else self._seed(),
            "max_tokens": most,
            "min_tokens": min(missing, most) if bans_by_vllm else 0,
            "stop_token_ids": sorted(self.stop_ids),
            # End tokens are among the stop tokens when they count.
            "ignore_eos": True,
            "logprobs": 0,
            "flat_logprobs": True,
            "detokenize": False,
            "stream_interval": _ONLY_FIRST_AND_LAST,
            "skip_reading_prefix_cache": True if self.isolated else None,
        }

    def saw_output(self, when: float) -> None:
        """Something of it arrived."""
        self.began = when if self.began is None else self.began

    def take(self, answer: Answer) -> None:
        """Append what vLLM made; may end the sample."""
        first = len(self.tokens)
        self.tokens.extend(answer.token_ids)
        self.logprobs.extend(answer.logprobs)
        for span in answer.versions:
            self._append_version(span.policy_version, first + span.start, first + span.end)
        if not all(math.isfinite(value) for value in answer.logprobs):
            self._fail("LOGITS_NOT_FINITE", "the model's logits are not finite")
        elif answer.finish_reason == "stop":
            self._stop()
        elif answer.finish_reason == "length":
            self.finish_reason = FinishReason.LENGTH
        elif self.tokens:
            # What had not begun waits for its turn, like any other sample in the queue.
            self.finish_reason = FinishReason.ABORTED

    def completion(self) -> Completion:
        """The finished sample."""
        if self.failure is not None:
            return Completion(sample_id=self.sample_id, failure=self.failure)
        zero = self.is_greedy and self.kind is LogprobKind.PROCESSED
        return Completion(
            sample_id=self.sample_id,
            token_ids=np.array(self.tokens, np.int32),
            # Greedy: all of the distribution lies on the token that was taken.
            logprobs=np.array([0.0] * len(self.tokens) if zero else self.logprobs, np.float32),
            finish_reason=self.finish_reason or FinishReason.ABORTED,
            versions=tuple(self.versions),
        )

    def _seed(self) -> int:
        """The sample's own seed; another one after each token that was dropped."""
        if self.draws == 0:
            return self.seed % (1 << _SEED_BITS)
        text = f"{self.seed}/{self.draws}".encode()
        digest = hashlib.blake2b(text, digest_size=8).digest()
        return int.from_bytes(digest, "little") % (1 << _SEED_BITS)

    def _stop(self) -> None:
        if len(self.tokens) > self.sampling.min_new_tokens:
            self.finish_reason = FinishReason.STOP
            return
        self.draws += 1
        if self.draws >= MAX_DRAWS:
            self._fail("STOP_TOO_EARLY", f"{MAX_DRAWS} draws all gave a stop token too early")
            return
        self.tokens.pop()
        self.logprobs.pop()
        last = self.versions.pop()
        if last.end - 1 > last.start:
            self._append_version(last.policy_version, last.start, last.end - 1)

    def _append_version(self, policy_version: int, start: int, end: int) -> None:
        if self.versions and self.versions[-1].policy_version == policy_version:
            start = self.versions.pop().start
        self.versions.append(VersionSpan(policy_version=policy_version, start=start, end=end))

    def _fail(self, reason: str, message: str) -> None:
        self.failure = Failure(error_class="DATA", reason=reason, message=message)

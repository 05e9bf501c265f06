"""One sample: what the server is asked for, and what its answers add up to."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quartet.errors import InfraError
from quartet.types import FinishReason, VersionSpan
from quartet_rollout.engines.vllm.sample import Answer, Sample

STREAM_INTERVAL = 8
"""Tokens of one event, where the server can: what a pause may lose of a completion."""

_PASSED_ON = (
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "max_tokens",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
)
_NEUTRAL: Mapping[str, Any] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_p": 0.0,
}
"""What a server may take from the model's generation_config.json unless the request says it."""

_PLACEHOLDER = "token_id:"
_SEED_BITS = 63


@dataclass(kw_only=True, slots=True, eq=False)
class ServedSample(Sample):
    """A sample that is asked for over HTTP, perhaps in several parts."""

    parts: int = 0
    """Times that it was interrupted after some tokens, to go on later."""
    is_given_up: bool = False
    """It ends with the tokens that it has, if it has any."""

    def body(self, model: str) -> dict[str, Any]:
        """The JSON of a request for what is left to do."""
        parameters = self.parameters()
        return {
            "model": model,
            "prompt": self.all_tokens(),
            "stream": True,
            "stream_interval": STREAM_INTERVAL,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **_NEUTRAL,
            **{name: parameters[name] for name in _PASSED_ON},
            "seed": self._seed_of_part(parameters["seed"]),
        }

    def take_part(self, answer: Answer) -> None:
        """Append what had arrived when the request was given up; the rest is asked for anew."""
        # The last token may have come before the event that says that it is the last.
        last = answer.token_ids[-1] if answer.token_ids else None
        is_full = len(self.tokens) + len(answer.token_ids) >= self.max_tokens
        ended = "stop" if last in self.stop_ids else "length" if is_full else None
        self.take(replace(answer, finish_reason=ended))
        if ended is None and self.failure is None:
            self.finish_reason = None
        self.parts += bool(answer.token_ids)

    def give_up(self) -> None:
        """End with the tokens so far; what has none waits for its turn like any other."""
        self.is_given_up = False
        if self.tokens and not self.is_done:
            self.finish_reason = FinishReason.ABORTED

    def _seed_of_part(self, seed: int | None) -> int | None:
        """Another seed for each part: the server begins with its first random number again."""
        if seed is None or not self.parts:
            return seed
        text = f"{seed}/part/{self.parts}".encode()
        digest = hashlib.blake2b(text, digest_size=8).digest()
        return int.from_bytes(digest, "little") % (1 << _SEED_BITS)


@dataclass(kw_only=True, slots=True, eq=False)
class Reading:
    """Events of one request, as they come."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Of `token_ids`; NaN where the server has none."""
    finish_reason: str | None = None

    def take(self, event: Any) -> None:
        """Append an event.

        Raises:
            InfraError: It has no token ids, or not as many log-probabilities (ANSWER_MALFORMED).
        """
        try:
            choices: Sequence[Mapping[str, Any]] = event["choices"]
            for choice in choices:
                self._append(choice)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InfraError(
                f"the server's answer is no completion with token ids: {error!r}",
                reason="ANSWER_MALFORMED",
                remedy="use a server that knows return_token_ids, as vLLM's does",
            ) from error

    def answer(self, policy_version: int) -> Answer:
        """All of it, made by one version."""
        span = VersionSpan(policy_version=policy_version, start=0, end=len(self.token_ids))
        return Answer(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            versions=[span] if self.token_ids else [],
        )

    def _append(self, choice: Mapping[str, Any]) -> None:
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        found = choice.get("logprobs") or {}
        values = found.get("token_logprobs") or []
        token_ids = choice.get("token_ids")
        if token_ids is None:
            token_ids = [_placeholder(token) for token in found.get("tokens") or []]
            if choice.get("text") and not token_ids:
                raise ValueError("it has text, and neither token_ids nor logprobs")
        if len(token_ids) != len(values):
            raise ValueError(f"{len(token_ids)} tokens and {len(values)} log-probabilities")
        self.token_ids.extend(int(token) for token in token_ids)
        # A number that JSON cannot say arrives as null.
        self.logprobs.extend(float("nan") if value is None else float(value) for value in values)


def _placeholder(token: str) -> int:
    """The id in "token_id:17"."""
    if not token.startswith(_PLACEHOLDER):
        raise ValueError(f"token {token!r} is a text, not an id")
    return int(token.removeprefix(_PLACEHOLDER))

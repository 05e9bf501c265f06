"""One episode as the trainer sees it: what is asked for, what the policy said, what came out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quartet.errors import DataError
from quartet.types import Completion, FinishReason, Reward, SamplingParams

MAX_ABS = 1e6
"""Largest reward believed: one beyond it is a bug, and would be the whole signal of its group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """A sample that an agent is to make."""

    sample_id: str
    prompt: str
    label: Any
    sampling: SamplingParams
    max_length: int
    """Most tokens of the sample."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Turn:
    """A prompt that the agent gave, and its completion."""

    prompt_token_ids: tuple[int, ...]
    completion: Completion
    replica: str


@dataclass(kw_only=True, slots=True, eq=False)
class Script:
    """Everything that the policy said in an episode."""

    turns: list[Turn] = field(default_factory=list)

    def limit(self, vocab_size: int) -> int:
        """Token ids are below it: those of the tokenizer, and what the policy itself sampled."""
        sampled = [int(turn.completion.token_ids.max()) for turn in self.turns]
        return max([vocab_size, *(token + 1 for token in sampled)])

    @property
    def versions(self) -> tuple[int, int]:
        """The oldest and the newest weights that took part."""
        spans = [span.policy_version for t in self.turns for span in t.completion.versions]
        return min(spans), max(spans)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Play:
    """A finished episode of T tokens, checked."""

    token_ids: NDArray[np.int32]  # [T], the last one sampled by the policy
    action_mask: NDArray[np.bool_]  # [T]
    rollout_logprobs: NDArray[np.float32]  # [T]
    """0 where action_mask is False."""
    finish_reason: FinishReason
    """LENGTH when a completion was cut, or the context was full before the end."""
    reward: Reward


def read_result(
    result: Mapping[str, Any], script: Script, *, max_length: int, vocab_size: int
) -> Play:
    """Check what `execute` returned, as plain JSON values.

    Tokens behind the last action are left away: nothing is learnt from them.

    Raises:
        DataError: it is not a sample that could be trained on, and why (BAD_RESULT, NO_ACTION,
            TOO_LONG, BAD_REWARD, NO_LOGPROBS).
    """
    if not script.turns:
        raise _bad("NO_ACTION", "the agent never asked the policy")
    values = token_ids(
        result.get("observation_tokens"), "observation_tokens", limit=script.limit(vocab_size)
    )
    tokens = np.array(values, np.int32)
    ranges = _ranges(result.get("action_ranges"), len(tokens))
    if not ranges:
        raise _bad("NO_ACTION", "the episode has no token that the policy sampled")
    length = ranges[-1][1]
    if length > max_length:
        raise _bad("TOO_LONG", f"actions end at {length} tokens, a sample has at most {max_length}")
    mask = np.zeros(len(tokens), np.bool_)
    for start, end in ranges:
        mask[start:end] = True
    given = _logprobs(result.get("rollout_log_probs"), len(tokens))
    logprobs = _as_sampled(tokens, mask, script, given)
    reward = _number(result.get("reward"), "reward")
    score = result.get("scores")
    cut = bool(result.get("truncated"))
    return Play(
        token_ids=tokens[:length],
        action_mask=mask[:length],
        rollout_logprobs=logprobs[:length],
        finish_reason=FinishReason.LENGTH if cut else FinishReason.STOP,
        reward=Reward(
            reward=reward,
            score=reward if score is None else _number(score, "scores"),
            extra_logs=_extra_logs(result.get("extra_logs")) | {"num_turns": float(len(ranges))},
        ),
    )


def token_ids(value: Any, name: str, *, limit: int) -> list[int]:
    """A list of token ids, which it must be.

    Raises:
        DataError: it is something else.
    """
    if not isinstance(value, list) or not value:
        raise _bad("BAD_RESULT", f"{name} is no list of token ids, or an empty one")
    for position, token in enumerate(value):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < limit:
            raise _bad(
                "BAD_RESULT",
                f"{name}[{position}] is {token!r}, not one of the {limit} token ids",
            )
    return value


def _ranges(value: Any, length: int) -> list[tuple[int, int]]:
    """[start, end) of each action, in order and apart; empty ones are left away."""
    if not isinstance(value, list):
        raise _bad("BAD_RESULT", "action_ranges is no list of [start, end)")
    found: list[tuple[int, int]] = []
    last = 0
    for entry in value:
        match entry:
            case [int(start), int(end)] if last <= start <= end <= length:
                last = end
            case _:
                raise _bad(
                    "BAD_RESULT",
                    f"action_ranges has {entry!r}: ranges are [start, end), in order, apart, and "
                    f"inside the {length} tokens",
                )
        if end > start:
            found.append((start, end))
    if found and found[0][0] == 0:
        raise _bad("BAD_RESULT", "the first token is an action, but nothing predicts it")
    return found


def _logprobs(value: Any, length: int) -> NDArray[np.float32] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != length:
        size = len(value) if isinstance(value, list) else "no"
        raise _bad("BAD_RESULT", f"rollout_log_probs has {size} numbers for {length} tokens")
    if not all(isinstance(number, int | float) for number in value):
        raise _bad("BAD_RESULT", "rollout_log_probs has entries that are no numbers")
    return np.array(value, np.float32)


def _as_sampled(
    tokens: NDArray[np.int32],
    mask: NDArray[np.bool_],
    script: Script,
    given: NDArray[np.float32] | None,
) -> NDArray[np.float32]:
    """[T] log-probabilities of the actions.

    Where a completion stands in the sample behind exactly the prompt it was sampled from, they are
    the engine's own. Elsewhere (a context that the agent rewrote) they are those that it gives.
    """
    logprobs = np.zeros(len(tokens), np.float32)
    known = np.zeros(len(tokens), np.bool_)
    for turn in script.turns:
        start = len(turn.prompt_token_ids)
        sampled = turn.completion.token_ids
        if len(tokens) <= start or not np.array_equal(tokens[:start], turn.prompt_token_ids):
            continue
        same = np.cumprod(tokens[start : start + len(sampled)] == sampled[: len(tokens) - start])
        end = start + int(same.sum())
        logprobs[start:end] = turn.completion.logprobs[: end - start]
        known[start:end] = True
    unknown = mask & ~known
    if unknown.any():
        where = int(np.flatnonzero(unknown)[0])
        if given is None:
            raise _bad(
                "NO_LOGPROBS",
                f"token {where} is an action that the policy did not sample there, and there are "
                "no rollout_log_probs",
            )
        logprobs[unknown] = given[unknown]
    logprobs[~mask] = 0.0
    if not np.isfinite(logprobs).all() or (logprobs > 0).any():
        raise _bad("BAD_RESULT", "rollout_log_probs has actions without a finite number up to 0")
    return logprobs


def _number(value: Any, name: str) -> float:
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, int | float):
        raise _bad("BAD_REWARD", f"{name} is {value!r}, not a number")
    if not math.isfinite(value) or abs(value) > MAX_ABS:
        raise _bad(
            "BAD_REWARD", f"{name} is {value}; believed is what is finite, up to {MAX_ABS:g}"
        )
    return float(value)


def _extra_logs(value: Any) -> dict[str, float]:
    """The finite numbers among what an agent logs; the first of a list."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _bad("BAD_RESULT", "extra_logs is no dict of names and numbers")
    found: dict[str, float] = {}
    for name, entry in value.items():
        while isinstance(entry, list) and entry:
            entry = entry[0]
        if isinstance(entry, int | float) and math.isfinite(entry):
            found[str(name)] = float(entry)
    return found


def _bad(reason: str, message: str) -> DataError:
    return DataError(message, reason=reason)


def as_json_sampling(sampling: SamplingParams) -> dict[str, Any]:
    """The sampling that an agent's `sampling_params` begins with."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": sampling.min_new_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
    }

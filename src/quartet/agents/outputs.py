"""What an agent asks the policy with, and what it gets back: the shapes of vLLM, without vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(kw_only=True)
class SamplingParams:
    """How a completion is sampled. Each episode has an object of its own, which it may change."""

    temperature: float = 1.0
    """The run's, as are top_p and top_k: others would be another policy than the one trained."""
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int | None = None
    """Most tokens of the next completion. None, or more than a turn may have, is what it may."""
    min_tokens: int = 1
    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end a completion, beside the model's own end token."""
    ignore_eos: bool = False
    """Do not stop at the model's own end token."""
    logprobs: int | None = 1
    """Outputs always have the log-probability of each sampled token, and no others."""
    skip_special_tokens: bool = False
    """Texts always show special tokens."""

    def clone(self) -> SamplingParams:
        """A copy to change."""
        return replace(self, stop_token_ids=list(self.stop_token_ids))


NOT_TAKEN: dict[str, tuple[Any, ...]] = {
    "n": (1, None),
    "best_of": (1, None),
    "seed": (None,),
    "stop": (None, [], ()),
    "bad_words": (None, []),
    "logit_bias": (None, {}),
    "min_p": (0.0, None),
    "presence_penalty": (0.0, None),
    "frequency_penalty": (0.0, None),
    "repetition_penalty": (1.0, None),
}
"""Settings that other SamplingParams have, with the values that ask for nothing."""


def as_wire(params: Any, ours: SamplingParams) -> dict[str, Any]:
    """What is asked of the trainer for `params`, ours or another class with the same names.

    Args:
        params: as user code gives them; None is `ours`.
        ours: the sampling of the run.

    Raises:
        ValueError: it asks for what cannot be had, naming it.
    """
    if params is None:
        params = ours
    for name, harmless in NOT_TAKEN.items():
        value = getattr(params, name, harmless[0])
        if value not in harmless:
            raise ValueError(f"sampling_params.{name} is {value!r}: agents cannot set it")
    for name in ("temperature", "top_p", "top_k"):
        value, fixed = getattr(params, name), getattr(ours, name)
        if value != fixed and not (name == "top_k" and value <= 0 and fixed <= 0):
            raise ValueError(
                f"sampling_params.{name} is {value!r}, this run samples with {fixed!r}: tokens of "
                f"another distribution cannot be trained on; set --rollout.{name}"
            )
    return {
        "max_tokens": params.max_tokens,
        "min_tokens": getattr(params, "min_tokens", 1) or 0,
        "stop_token_ids": list(getattr(params, "stop_token_ids", None) or ()),
        "ignore_eos": bool(getattr(params, "ignore_eos", False)),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Logprob:
    """The log-probability of one token."""

    logprob: float
    rank: int | None = None
    """Unknown here; the field is there for code that was written for vLLM."""
    decoded_token: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOutput:
    """One completion of T tokens."""

    index: int
    text: str
    """With special tokens, but without the stop token that ended it."""
    token_ids: list[int]  # [T], the stop token included
    logprobs: list[dict[int, Logprob]]  # [T]
    """For each token its own log-probability, under its own id."""
    cumulative_logprob: float
    finish_reason: str
    """stop or length."""
    stop_reason: int | str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """The answer to one request."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True


def output_of(
    answer: dict[str, Any], prompt_token_ids: Sequence[int], *, tokenizer: Any
) -> RequestOutput:
    """The output that a trainer's answer makes."""
    tokens, logprobs = answer["token_ids"], answer["logprobs"]
    stopped = answer["finish_reason"] == "stop"
    shown = tokens[:-1] if stopped else tokens
    completion = CompletionOutput(
        index=0,
        text=tokenizer.decode(shown, skip_special_tokens=False),
        token_ids=tokens,
        logprobs=[
            {token: Logprob(logprob=value)} for token, value in zip(tokens, logprobs, strict=True)
        ],
        cumulative_logprob=sum(logprobs),
        finish_reason=answer["finish_reason"],
        stop_reason=tokens[-1] if stopped and tokens[-1] != tokenizer.eos_token_id else None,
    )
    return RequestOutput(
        request_id=answer["request_id"],
        prompt=None,
        prompt_token_ids=list(prompt_token_ids),
        outputs=[completion],
    )

"""What agents are made of: an executor makes one sample; an instance is the world it acts in.

Tokens in, tokens out: what the policy sampled is never decoded and encoded again on its way to
the learner. What the world answers is encoded by itself, put behind it, and never trained on.
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from quartet.agents.outputs import CompletionOutput, RequestOutput, SamplingParams

Result = dict[str, Any]
"""What `execute` returns: observation_tokens (ids), action_ranges ([start, end) of what the policy
sampled), rollout_log_probs (a number a token, or None), truncated, reward, scores, extra_logs."""


class LlmEngine(Protocol):
    """The policy, as it is served now."""

    async def generate(
        self,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        multi_modal_data: None = None,
    ) -> RequestOutput:
        """Complete a prompt.

        Raises:
            RuntimeError: the prompt cannot be completed: it leaves no room, for example.
        """
        ...


class AgentInstanceBase(ABC):
    """A world with `reset` and `step`, one object for each sample. Both may be async or plain."""

    @abstractmethod
    def reset(self, states: dict[str, Any], **kwargs: Any) -> Any:
        """Begin an episode.

        Args:
            states: `observation`, the prompt as text, and `label`.
            kwargs: Nothing today.

        Returns:
            A dict with `observation`: the text that the policy sees first.
        """

    @abstractmethod
    def step(self, states: dict[str, Any], **kwargs: Any) -> Any:
        """Answer an action.

        Args:
            states: `observation_text` (everything before the action), `action_text`, `label`, and
                `sampling_params` of the turn.
            kwargs: Nothing today.

        Returns:
            A dict with `rewards` (a number or a tensor of one; those of all turns are added up) and
            `done`; and as needed `scores` (instead of the sum of rewards), `environment_feedback`
            (text that the policy sees next), `sampling_params` (for the turns that follow), and
            `extra_logs` (names and numbers; of several turns the last one counts).
        """


class AgentExecutorBase(ABC):
    """Makes samples. One object in each worker process makes many at the same time."""

    @abstractmethod
    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: SamplingParams,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: LlmEngine,
        images: None = None,
    ) -> Result:
        """Make one sample.

        Args:
            prompt: as rendered, chat template included.
            label: what the data set says of it.
            sampling_params: a copy of this sample's own; max_tokens is the most a turn may have.
            max_length: most tokens of the sample, --data.max_len.
            hf_tokenizer: the policy's.
            llm_engine: the policy.
            images: always None: there are no models of images.
        """


class MultiTurnAgentExecutor(AgentExecutorBase):
    """Plays episodes: reset, then act and step until the world is done or the context is full."""

    def __init__(self, agent_instance_cls: Callable[[], AgentInstanceBase]) -> None:
        """Play in worlds that `agent_instance_cls()` makes."""
        self.agent_instance_cls = agent_instance_cls

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: SamplingParams,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: LlmEngine,
        images: None = None,
    ) -> Result:
        """Play one episode: a turn whose completion is cut is still a turn."""
        world = self.agent_instance_cls()
        first = _dict_of(
            "reset", await _called(world.reset, {"observation": prompt, "label": label})
        )
        _no_images("reset", first)
        episode = _Episode(text=_text_of("reset", first, "observation"))
        episode.tokens = _encode(hf_tokenizer, episode.text)
        most_tokens = sampling_params.max_tokens
        while True:
            room = max_length - len(episode.tokens)
            if room <= 0:
                episode.truncated = True
                break
            limits = [room, most_tokens, sampling_params.max_tokens]
            turn = _copy(sampling_params)
            turn.max_tokens = min(limit for limit in limits if limit is not None)
            output = await llm_engine.generate(list(episode.tokens), turn)
            action = output.outputs[0]
            episode.act(action)
            states = {
                "observation_text": episode.text,
                "action_text": action.text,
                "label": label,
                "sampling_params": _copy(sampling_params),
            }
            answer = _dict_of("step", await _called(world.step, states))
            _no_images("step", answer)
            feedback = _text_of("step", answer, "environment_feedback", "")
            done = episode.judge(answer)
            episode.text += action.text + feedback
            # Beyond the limit there is nothing to act on, so what is there is never cut.
            encoded = _encode(hf_tokenizer, feedback)
            episode.observe(encoded[: max_length - len(episode.tokens)])
            if done:
                break
            if answer.get("sampling_params") is not None:
                sampling_params = answer["sampling_params"]
        return episode.result(prompt, label)


class SingleTurnAgentExecutor(AgentExecutorBase):
    """One completion of the prompt, and a reward for it."""

    def __init__(self, reward_func: Callable[..., Any]) -> None:
        """Judge by `reward_func(queries, prompts, labels)`, lists of one: that of reward files."""
        self.reward_func = reward_func

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: SamplingParams,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: LlmEngine,
        images: None = None,
    ) -> Result:
        """Complete the prompt and have the completion judged."""
        episode = _Episode(text=prompt, tokens=_encode(hf_tokenizer, prompt))
        room = max_length - len(episode.tokens)
        if room <= 0:
            raise ValueError(
                f"the prompt has {len(episode.tokens)} tokens, a sample at most {max_length}"
            )
        turn = _copy(sampling_params)
        turn.max_tokens = room if turn.max_tokens is None else min(room, turn.max_tokens)
        output = await llm_engine.generate(list(episode.tokens), turn)
        episode.act(output.outputs[0])
        query = hf_tokenizer.decode(episode.tokens, skip_special_tokens=False)
        answer = _dict_of(
            "reward_func", await _called(self.reward_func, [query], [prompt], [label])
        )
        episode.judge({**answer, "done": True}, who="reward_func")
        return episode.result(prompt, label)


@dataclass
class _Episode:
    """A sample in the making."""

    text: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranges: list[tuple[int, int]] = field(default_factory=list)
    reward: float = 0.0
    score: float | None = None
    extra_logs: dict[str, Any] = field(default_factory=dict)
    truncated: bool = False

    def act(self, action: CompletionOutput) -> None:
        """Put what the policy sampled behind what it saw."""
        self.logprobs += [0.0] * (len(self.tokens) - len(self.logprobs))
        start = len(self.tokens)
        self.tokens += action.token_ids
        self.logprobs += [
            entry[token].logprob
            for token, entry in zip(action.token_ids, action.logprobs, strict=True)
        ]
        self.ranges.append((start, len(self.tokens)))
        self.truncated |= action.finish_reason == "length"

    def observe(self, tokens: list[int]) -> None:
        """Put what the world answered behind it."""
        self.tokens += tokens

    def judge(self, answer: Mapping[str, Any], *, who: str = "step") -> bool:
        """Take in rewards, scores and logs; returns whether the world is done."""
        for key in ("rewards", "done"):
            if answer.get(key) is None:
                keys = ", ".join(map(str, answer)) or "none"
                raise ValueError(f"{who} returned no {key!r} (its keys: {keys})")
        self.reward += number(answer["rewards"], "rewards")
        if answer.get("scores") is not None:
            self.score = number(answer["scores"], "scores")
        else:
            self.score = None
        self.extra_logs |= _dict_of("extra_logs", answer.get("extra_logs") or {})
        return bool(answer["done"])

    def result(self, prompt: str, label: Any) -> Result:
        """The sample."""
        self.logprobs += [0.0] * (len(self.tokens) - len(self.logprobs))
        return {
            "prompt": prompt,
            "label": label,
            "observation_tokens": self.tokens,
            "action_ranges": self.ranges,
            "rollout_log_probs": self.logprobs,
            "truncated": self.truncated,
            "reward": self.reward,
            "scores": self.reward if self.score is None else self.score,
            "extra_logs": self.extra_logs,
        }


def number(value: Any, name: str) -> float:
    """A number, or the one number of a list, an array or a tensor.

    Raises:
        ValueError: it is no number, or several.
    """
    plain = value.tolist() if hasattr(value, "tolist") else value
    while isinstance(plain, list | tuple) and len(plain) == 1:
        plain = plain[0]
    if isinstance(plain, list | tuple):
        raise ValueError(f"{name} has {len(plain)} numbers, one sample has one")
    if not hasattr(plain, "__float__"):
        raise ValueError(f"{name} is {plain!r}, not a number")
    return float(plain)


async def _called(function: Callable[..., Any], *arguments: Any) -> Any:
    """What an async or a plain function returns."""
    answer = function(*arguments)
    return await answer if inspect.isawaitable(answer) else answer


def _dict_of(who: str, answer: Any) -> dict[str, Any]:
    if not isinstance(answer, Mapping):
        raise ValueError(f"{who} is or returned a {type(answer).__name__}, not a dict")
    return dict(answer)


def _text_of(who: str, answer: dict[str, Any], key: str, default: str | None = None) -> str:
    text = answer.get(key, default)
    if not isinstance(text, str):
        raise ValueError(f"{who} returned {key!r} as {type(text).__name__}, not as text")
    return text


def _no_images(who: str, answer: dict[str, Any]) -> None:
    for key in ("images", "environment_images"):
        if answer.get(key):
            raise ValueError(f"{who} returned {key!r}: models of images are not in this release")


def _encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text, without special tokens that the text does not hold."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def _copy(params: SamplingParams) -> SamplingParams:
    """A copy, of ours or of another class with the same names."""
    return params.clone() if hasattr(params, "clone") else copy.copy(params)

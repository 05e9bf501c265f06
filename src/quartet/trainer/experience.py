"""What a rollout is while the trainer holds it: groups of samples, then one flat experience."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quartet.data.samples import Prompt
from quartet.types import FinishReason, LogprobSpec, Reward, SequenceBatch, VersionSpan

Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """One completion and its prompt, T tokens together."""

    sample_id: str
    group: int
    """Number of its prompt in the rollout."""
    prompt: Prompt
    token_ids: NDArray[np.int32]  # [T]
    rollout_logprobs: Floats  # [T]
    """As the rollout engine gives them; 0 on the prompt."""
    finish_reason: FinishReason
    first_policy_version: int
    last_policy_version: int
    replica: str
    versions: tuple[VersionSpan, ...] = ()
    """Which weights sampled which tokens of the completion."""
    action_spans: tuple[tuple[int, int], ...] = ()
    """Parts [start, end) that the policy sampled, in order and not empty, when an agent put other
    tokens between them; the last one ends the sample. Without: all that is behind the prompt."""

    @property
    def prompt_length(self) -> int:
        """Tokens before the first one that the policy sampled."""
        return self.action_spans[0][0] if self.action_spans else len(self.prompt.token_ids)

    @property
    def response_length(self) -> int:
        """Tokens of the completion, with those that an agent put into it."""
        return len(self.token_ids) - self.prompt_length

    @property
    def action_mask(self) -> NDArray[np.bool_]:
        """[T] True on what the policy sampled."""
        mask = np.zeros(len(self.token_ids), np.bool_)
        for start, end in self.action_spans or ((self.prompt_length, len(mask)),):
            mask[start:end] = True
        return mask

    @property
    def truncated(self) -> bool:
        """Whether the completion was cut by its length."""
        return self.finish_reason is FinishReason.LENGTH


@dataclass(kw_only=True, slots=True, eq=False)
class Group:
    """The samples of one prompt on their way through the services. Filled as answers come."""

    index: int
    prompt: Prompt
    samples: list[Sample] = field(default_factory=list)
    """Those that are still in, in the order of their seeds."""
    rewards: dict[str, Reward] = field(default_factory=dict)
    old_logprobs: dict[str, Floats] = field(default_factory=dict)  # [T] each
    ref_logprobs: dict[str, Floats] = field(default_factory=dict)  # [T] each
    values: dict[str, Floats] = field(default_factory=dict)  # [T] each

    def batch(self) -> SequenceBatch:
        """The samples as one chunk for a service."""
        return SequenceBatch.of(
            [s.token_ids.tolist() for s in self.samples], [s.sample_id for s in self.samples]
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Experience:
    """B samples of N tokens together, in the order of prompts and seeds."""

    samples: tuple[Sample, ...]
    rewards: tuple[Reward, ...]
    old_logprobs: Floats  # [N]
    ref_logprobs: Floats | None  # [N]
    """None without a reference model."""
    values: Floats | None  # [N]
    """None without a critic."""
    logprob_spec: LogprobSpec
    """Distribution of the rollout engine's log-probabilities."""

    def __len__(self) -> int:
        """Number of samples, B."""
        return len(self.samples)

    @property
    def lengths(self) -> NDArray[np.int32]:
        """[B] tokens of each sample."""
        return np.array([len(s.token_ids) for s in self.samples], np.int32)

    @property
    def sequences(self) -> SequenceBatch:
        """All tokens."""
        tokens = [s.token_ids for s in self.samples]
        return SequenceBatch(
            token_ids=_join(tokens, np.int32),
            lengths=self.lengths,
            sample_ids=tuple(s.sample_id for s in self.samples),
        )

    @property
    def action_mask(self) -> NDArray[np.bool_]:
        """[N] True on the tokens that the policy sampled."""
        return _join([s.action_mask for s in self.samples], np.bool_)

    @property
    def rollout_logprobs(self) -> Floats:
        """[N] as the rollout engines gave them."""
        return _join([s.rollout_logprobs for s in self.samples], np.float32)

    @property
    def groups(self) -> NDArray[np.int64]:
        """[B] number of each sample's prompt."""
        return np.array([s.group for s in self.samples], np.int64)

    @property
    def response_lengths(self) -> NDArray[np.int64]:
        """[B] tokens of each completion."""
        return np.array([s.response_length for s in self.samples], np.int64)

    @property
    def truncated(self) -> NDArray[np.bool_]:
        """[B] which completions were cut."""
        return np.array([s.truncated for s in self.samples], np.bool_)


def assemble(
    groups: Sequence[Group], *, logprob_spec: LogprobSpec, with_ref: bool, with_values: bool
) -> Experience:
    """Lay the samples of all groups end to end, in the order of prompts and seeds."""
    ordered = sorted(groups, key=lambda g: g.index)
    pairs = [(group, sample) for group in ordered for sample in group.samples]

    def column(name: str) -> Floats:
        by_group: list[Mapping[str, Floats]] = [getattr(g, name) for g, _ in pairs]
        return _join(
            [d[s.sample_id] for d, (_, s) in zip(by_group, pairs, strict=True)], np.float32
        )

    return Experience(
        samples=tuple(sample for _, sample in pairs),
        rewards=tuple(group.rewards[sample.sample_id] for group, sample in pairs),
        old_logprobs=column("old_logprobs"),
        ref_logprobs=column("ref_logprobs") if with_ref else None,
        values=column("values") if with_values else None,
        logprob_spec=logprob_spec,
    )


def _join(parts: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    """Lay arrays end to end; no arrays are an empty one."""
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)

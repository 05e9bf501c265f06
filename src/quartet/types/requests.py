"""Requests and answers that are more than one of the other types. One class a remote procedure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quartet.types.learner import ForwardOutput, RunSpec
from quartet.types.reward import ScoreItem
from quartet.types.rollout import LogprobKind, PromptGroup, ReplicaState, SamplingParams
from quartet.types.sequences import SequenceBatch
from quartet.types.weights import PushBackend, Rendezvous, WeightManifest


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """What RolloutService.Generate is asked."""

    request_id: str
    groups: tuple[PromptGroup, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    logprob_kind: LogprobKind = LogprobKind.PROCESSED
    min_policy_version: int | None = None
    """Oldest version that may answer; None takes any."""
    isolated: bool = False
    """Run these groups as a batch of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRequest:
    """What RewardService.Score is asked."""

    request_id: str
    items: tuple[ScoreItem, ...]
    tokenizer_fingerprint: str = ""
    """Of the tokenizer that made the items' token_ids; empty when there are none."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ComputeLogprobsRequest:
    """One chunk for RefService.ComputeLogprobs."""

    chunk_id: str
    sequences: SequenceBatch
    temperature: float = 1.0
    """Divisor of the logits."""
    max_tokens_per_micro_batch: int | None = None
    """Most tokens in one forward pass; None is the server's own."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ForwardRequest:
    """One chunk for LearnerService.Forward."""

    chunk_id: str
    sequences: SequenceBatch
    temperature: float = 1.0
    """Divisor of the logits."""
    output: ForwardOutput | None = None
    """What to compute; None is what the head gives."""
    max_tokens_per_micro_batch: int | None = None
    """Most tokens in one forward pass on one rank; None is the server's own."""
    with_entropy: bool = False
    """Compute the entropy of every token's distribution as well (lm head)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartRunRequest:
    """What LearnerService.StartRun is asked."""

    request_id: str
    spec: RunSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class StartRunResult:
    """Answer of StartRun."""

    optimizer_steps: int
    """Steps this run has behind it: 0 for a new one."""
    resumed: bool = False
    """True when the run was already under way."""
    num_parameters: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveCheckpointRequest:
    """What LearnerService.SaveCheckpoint is asked."""

    request_id: str
    folder: str
    tag: str
    trainer_state: bytes = b""
    """Opaque bytes of the trainer, kept with the checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadCheckpointRequest:
    """What LearnerService.LoadCheckpoint is asked."""

    request_id: str
    folder: str
    tag: str = ""
    """Empty: the latest whole one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadCheckpointResult:
    """Answer of LoadCheckpoint."""

    tag: str
    optimizer_steps: int
    trainer_state: bytes = b""
    run_id: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportModelRequest:
    """What LearnerService.ExportModel is asked."""

    request_id: str
    folder: str
    config_values: Mapping[str, float] = field(default_factory=dict)
    """Numbers to store in config.json, for example mean and std of a reward model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedFolder:
    """Answer of SaveCheckpoint and of ExportModel."""

    path: str
    size_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PushWeightsRequest:
    """What LearnerService.PushWeights is asked."""

    request_id: str
    policy_version: int
    addresses: tuple[str, ...]
    backend: PushBackend | None = None
    """None: gloo on CPU, nccl on GPU."""
    bucket_bytes: int = 64 << 20
    group_timeout: float = 30.0
    """Seconds: the longest wait inside the group for one operation."""
    folder: str = ""
    """For backend file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareWeightsRequest:
    """What RolloutService.PrepareWeights is asked."""

    request_id: str
    epoch: int
    """Number of this attempt; each push has a higher one than any before."""
    policy_version: int
    manifest: WeightManifest
    backend: PushBackend
    rendezvous: Rendezvous
    rank: int
    """First rank of this replica in the group; the sender is rank 0."""
    world_size: int
    group_timeout: float = 30.0
    """Seconds: the longest wait inside the group for one operation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareWeightsResult:
    """Answer of PrepareWeights: the replica has joined."""

    replica: str
    num_ranks: int = 1
    """Ranks this replica holds in the group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiveWeightsRequest:
    """What RolloutService.ReceiveWeights is asked."""

    epoch: int
    policy_version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitWeightsRequest:
    """What RolloutService.CommitWeights is asked."""

    epoch: int
    policy_version: int
    digest: str
    """Lower-case hex digest over all bytes, as the sender has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitWeightsResult:
    """Answer of CommitWeights."""

    policy_version: int
    completions_continued: int = 0
    """Completions that were running and go on with the new weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AbortWeightsRequest:
    """What RolloutService.AbortWeights is asked."""

    epoch: int
    cause: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class AbortWeightsResult:
    """Answer of AbortWeights."""

    policy_version: int
    state: ReplicaState
    """SERVING when the old weights are whole, STALE when they are not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SleepRequest:
    """What RolloutService.Sleep is asked."""

    request_id: str
    level: int = 1
    """1 keeps the weights in host memory, 2 forgets them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WakeRequest:
    """What RolloutService.Wake is asked."""

    request_id: str
    tags: tuple[str, ...] = ()
    """ "weights", "kv_cache"; none means both."""

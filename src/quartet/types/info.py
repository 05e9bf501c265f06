"""What services say of themselves."""

from __future__ import annotations

from dataclasses import dataclass

from quartet.types.learner import Head
from quartet.types.rollout import LogprobKind, ReplicaState
from quartet.types.weights import PushBackend, WeightManifest


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerInfo:
    """What every service says of itself."""

    service: str
    """rollout, reward, ref or learner."""
    api_version: str = "v1"
    server_version: str = ""
    replica: str = ""
    """Name of this server among its replicas, stable until the process ends."""
    digest: str = ""
    """Digest of the weights as loaded, or of the code that scores."""
    tokenizer_fingerprint: str = ""
    """See quartet.data.tokenizer.fingerprint; empty without a tokenizer."""
    capabilities: tuple[str, ...] = ()
    max_sequence_length: int = 0
    """Longest sequence in tokens; 0 when there is no limit."""
    max_concurrent_calls: int = 0
    model_name_or_path: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutInfo:
    """Answer of RolloutService.GetInfo."""

    info: ServerInfo
    engine: str
    state: ReplicaState
    policy_version: int
    logprob_kinds: tuple[LogprobKind, ...] = ()
    push_backends: tuple[PushBackend, ...] = ()
    manifest: WeightManifest | None = None
    completions_in_flight: int = 0
    push_ranks: tuple[int, ...] = ()
    """Ranks that it takes in a group of each of `push_backends`; empty is one in each."""

    def ranks_in(self, backend: PushBackend) -> int:
        """Ranks that it takes in a push's group of that backend."""
        ranks = dict(zip(self.push_backends, self.push_ranks, strict=False))
        return ranks.get(backend, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardInfo:
    """Answer of RewardService.GetInfo."""

    info: ServerInfo
    scorers: tuple[str, ...]
    max_samples_per_call: int = 0
    needs_token_ids: bool = False
    normalizes: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RefInfo:
    """Answer of RefService.GetInfo."""

    info: ServerInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerInfo:
    """Answer of LearnerService.GetInfo."""

    info: ServerInfo
    head: Head
    world_size: int = 1
    num_parameters: int = 0
    run_id: str = ""
    optimizer_steps: int = 0
    policy_version: int = 0
    manifest: WeightManifest | None = None

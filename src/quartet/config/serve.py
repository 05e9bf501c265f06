"""The configurations of `quartet serve {rollout,reward,ref,learner}`.

They are made of the trainer's sections, so a flag has one meaning in both. `--host` and `--port`
are short for `--rpc.host` and `--rpc.port`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quartet.config.data import TokenizerFields
from quartet.config.ds import HeadLoadConfig, LoadConfig, PpoDsConfig
from quartet.config.launch import LearnerModelConfig, RefModelConfig
from quartet.config.models import RewardSourceFields
from quartet.config.rpc import HttpFrontConfig, MetricsConfig, RpcConfig
from quartet.config.sampling import RolloutEngineConfig, VllmEngineFields
from quartet.config.train import DeterminismFields


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceFields:
    """What every service has."""

    rpc: RpcConfig = field(default_factory=RpcConfig)
    """Where the service listens."""
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    """Prometheus metrics."""
    data: TokenizerFields = field(default_factory=TokenizerFields)
    """Context length and tokenizer."""
    use_ms: bool = False
    """Download from ModelScope."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutServeConfig(ServiceFields):
    """The rollout service: generates completions with one engine."""

    rollout: RolloutEngineConfig = field(default_factory=RolloutEngineConfig)
    """The engine and its model."""
    vllm: VllmEngineFields = field(default_factory=VllmEngineFields)
    """Settings of the engine vllm."""
    ds: LoadConfig = field(default_factory=LoadConfig)
    """Model loading."""
    train: DeterminismFields = field(default_factory=DeterminismFields)
    """Seed and determinism."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardServeConfig(ServiceFields):
    """The reward service: scores completions. Answers to the flags of OpenRLHF's serve_rm."""

    reward: RewardSourceFields = field(default_factory=RewardSourceFields)
    """Where rewards come from."""
    ds: HeadLoadConfig = field(default_factory=HeadLoadConfig)
    """Model loading."""
    http: HttpFrontConfig = field(default_factory=HttpFrontConfig)
    """HTTP beside gRPC."""
    batch_size: int | None = None
    """Sequences of one forward pass. None: as many as are asked for together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RefServeConfig(ServiceFields):
    """The ref service: log-probabilities of a frozen model."""

    ref: RefModelConfig = field(default_factory=RefModelConfig)
    """The model."""
    ds: LoadConfig = field(default_factory=LoadConfig)
    """Model loading."""
    train: DeterminismFields = field(default_factory=DeterminismFields)
    """Seed and determinism."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerServeConfig(ServiceFields):
    """The learner service: trains one model with DeepSpeed."""

    learner: LearnerModelConfig = field(default_factory=LearnerModelConfig)
    """The model and its head."""
    ds: PpoDsConfig = field(default_factory=PpoDsConfig)
    """Model loading and DeepSpeed."""
    train: DeterminismFields = field(default_factory=DeterminismFields)
    """Seed and determinism."""


ServeConfig = RolloutServeConfig | RewardServeConfig | RefServeConfig | LearnerServeConfig
"""What `quartet serve` reads."""

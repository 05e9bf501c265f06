"""The configurations of `quartet train {ppo,sft,rm,dpo}`: sections, composed.

Names, types and defaults are those of OpenRLHF's command lines. What Quartet adds: `address`
fields, `learner`, `launch`, `rpc`, `push`, `run`, `metrics`, and single fields: docs/flags.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quartet.config.algo import AlgoConfig
from quartet.config.data import (
    DpoEvalConfig,
    EvalConfig,
    PpoEvalConfig,
    PreferenceDataConfig,
    PromptDataConfig,
    SftDataConfig,
)
from quartet.config.ds import LmDsConfig, PpoDsConfig, RmDsConfig
from quartet.config.launch import DialConfig, LaunchConfig, LearnerConfig
from quartet.config.models import (
    ActorConfig,
    CriticConfig,
    DpoModelConfig,
    DpoRefConfig,
    RefConfig,
    RewardConfig,
    RmModelConfig,
    SftModelConfig,
)
from quartet.config.optim import AdamConfig, OptimizerFields
from quartet.config.output import (
    CkptConfig,
    LoggerConfig,
    PpoCkptConfig,
    PushConfig,
    RunConfig,
    wandb_defaults,
)
from quartet.config.rpc import MetricsConfig
from quartet.config.sampling import RolloutConfig, VllmConfig
from quartet.config.train import PpoTrainConfig, TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class PpoConfig:
    """PPO and its family: sample, score, train, push, again."""

    actor: ActorConfig = field(default_factory=ActorConfig)
    """The policy."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The critic."""
    ref: RefConfig = field(default_factory=RefConfig)
    """The reference model."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """Rewards."""
    vllm: VllmConfig = field(default_factory=VllmConfig)
    """Rollout engines."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Sampling."""
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    """The algorithm."""
    train: PpoTrainConfig = field(default_factory=PpoTrainConfig)
    """Batches, epochs, placement."""
    data: PromptDataConfig = field(default_factory=PromptDataConfig)
    """Prompts."""
    eval: PpoEvalConfig = field(default_factory=PpoEvalConfig)
    """Evaluation."""
    ds: PpoDsConfig = field(default_factory=PpoDsConfig)
    """Model loading and DeepSpeed."""
    ckpt: PpoCkptConfig = field(default_factory=PpoCkptConfig)
    """Checkpoints."""
    logger: LoggerConfig = field(
        default_factory=lambda: LoggerConfig(wandb=wandb_defaults("openrlhf_train_ppo", "ppo"))
    )
    """Metrics."""
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    """The policy's learner service."""
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    """Patience with services."""
    rpc: DialConfig = field(default_factory=DialConfig)
    """Calls to services."""
    push: PushConfig = field(default_factory=PushConfig)
    """Weights on their way to the rollout services."""
    run: RunConfig = field(default_factory=RunConfig)
    """The run's folder."""
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    """Prometheus metrics of the trainer."""
    local_rank: int = -1
    """Set by launchers of other systems. Quartet starts its own processes; leave it at -1."""
    use_ms: bool = False
    """Download from ModelScope."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OfflineFields(OptimizerFields):
    """What SFT, RM and DPO have in common."""

    ckpt: CkptConfig = field(default_factory=CkptConfig)
    """Checkpoints and the final model."""
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    """Metrics."""
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    """The learner service."""
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    """Patience with services."""
    rpc: DialConfig = field(default_factory=DialConfig)
    """Calls to services."""
    run: RunConfig = field(default_factory=RunConfig)
    """The run's folder."""
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    """Prometheus metrics of the trainer."""
    local_rank: int = -1
    """Set by launchers of other systems. Quartet starts its own processes; leave it at -1."""
    use_ms: bool = False
    """Download from ModelScope."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SftConfig(OfflineFields):
    """Supervised fine-tuning."""

    model: SftModelConfig = field(default_factory=SftModelConfig)
    """The model."""
    data: SftDataConfig = field(default_factory=SftDataConfig)
    """Data."""
    train: TrainConfig = field(default_factory=lambda: TrainConfig(max_epochs=2))
    """Batches and epochs."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation."""
    ds: LmDsConfig = field(default_factory=LmDsConfig)
    """Model loading and DeepSpeed."""
    adam: AdamConfig = field(default_factory=lambda: AdamConfig(lr=5e-6))
    """AdamW."""
    ckpt: CkptConfig = field(default_factory=lambda: CkptConfig(path="./ckpt/checkpoints_sft"))
    """Checkpoints and the final model."""
    logger: LoggerConfig = field(
        default_factory=lambda: LoggerConfig(wandb=wandb_defaults("openrlhf_train_sft", "sft"))
    )
    """Metrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RmConfig(OfflineFields):
    """Training of a reward model from pairs."""

    model: RmModelConfig = field(default_factory=RmModelConfig)
    """The model."""
    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)
    """Data."""
    train: TrainConfig = field(default_factory=lambda: TrainConfig(micro_batch_size=1))
    """Batches and epochs."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation."""
    ds: RmDsConfig = field(default_factory=RmDsConfig)
    """Model loading and DeepSpeed."""
    adam: AdamConfig = field(default_factory=lambda: AdamConfig(lr=9e-6))
    """AdamW."""
    ckpt: CkptConfig = field(default_factory=lambda: CkptConfig(path="./ckpt/checkpoints_rm"))
    """Checkpoints and the final model."""
    logger: LoggerConfig = field(
        default_factory=lambda: LoggerConfig(wandb=wandb_defaults("openrlhf_train_rm", "rm"))
    )
    """Metrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DpoConfig(OfflineFields):
    """Direct preference optimisation."""

    model: DpoModelConfig = field(default_factory=DpoModelConfig)
    """The model."""
    ref: DpoRefConfig = field(default_factory=DpoRefConfig)
    """The reference model."""
    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)
    """Data."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Batches and epochs."""
    eval: DpoEvalConfig = field(default_factory=DpoEvalConfig)
    """Evaluation."""
    ds: LmDsConfig = field(default_factory=LmDsConfig)
    """Model loading and DeepSpeed."""
    adam: AdamConfig = field(default_factory=lambda: AdamConfig(lr=1e-5))
    """AdamW."""
    ckpt: CkptConfig = field(default_factory=lambda: CkptConfig(path="./ckpt/checkpoints_dpo"))
    """Checkpoints and the final model."""
    logger: LoggerConfig = field(
        default_factory=lambda: LoggerConfig(wandb=wandb_defaults("openrlhf_train_dpo", "exp"))
    )
    """Metrics."""


TrainerConfig = PpoConfig | SftConfig | RmConfig | DpoConfig
"""What `quartet train` reads."""

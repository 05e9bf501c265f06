"""Settings: one dataclass a section; flags, YAML keys, environment names and --help follow.

To add a flag, add a field with a docstring to its section, and use it. Nothing here imports torch,
and nothing here starts anything.
"""

from quartet.config.algo import AdvantageConfig, AlgoConfig, KlConfig
from quartet.config.data import (
    DpoEvalConfig,
    EvalConfig,
    PpoEvalConfig,
    PreferenceDataConfig,
    PromptDataConfig,
    SftDataConfig,
    TokenizerFields,
)
from quartet.config.ds import (
    HeadLoadConfig,
    LmDsConfig,
    LoadConfig,
    LoraConfig,
    PpoDsConfig,
    RmDsConfig,
)
from quartet.config.launch import (
    DialConfig,
    LaunchConfig,
    LearnerConfig,
    LearnerModelConfig,
    RefModelConfig,
)
from quartet.config.methods import DpoConfig, PpoConfig, RmConfig, SftConfig, TrainerConfig
from quartet.config.models import (
    ActorConfig,
    CriticConfig,
    DpoModelConfig,
    DpoRefConfig,
    ModelConfig,
    RefConfig,
    RewardConfig,
    RewardSourceFields,
    RmModelConfig,
    SftModelConfig,
)
from quartet.config.optim import AdamConfig, MuonConfig, OptimizerFields
from quartet.config.output import (
    CkptConfig,
    LoggerConfig,
    PpoCkptConfig,
    PushConfig,
    RunConfig,
    WandbConfig,
)
from quartet.config.rpc import HttpFrontConfig, MetricsConfig, RpcConfig
from quartet.config.sampling import (
    RolloutConfig,
    RolloutEngineConfig,
    VllmConfig,
    VllmEngineFields,
)
from quartet.config.serve import (
    LearnerServeConfig,
    RefServeConfig,
    RewardServeConfig,
    RolloutServeConfig,
    ServeConfig,
)
from quartet.config.train import DeterminismFields, PpoTrainConfig, TrainConfig

__all__ = [
    "ActorConfig",
    "AdamConfig",
    "AdvantageConfig",
    "AlgoConfig",
    "CkptConfig",
    "CriticConfig",
    "DeterminismFields",
    "DialConfig",
    "DpoConfig",
    "DpoEvalConfig",
    "DpoModelConfig",
    "DpoRefConfig",
    "EvalConfig",
    "HeadLoadConfig",
    "HttpFrontConfig",
    "KlConfig",
    "LaunchConfig",
    "LearnerConfig",
    "LearnerModelConfig",
    "LearnerServeConfig",
    "LmDsConfig",
    "LoadConfig",
    "LoggerConfig",
    "LoraConfig",
    "MetricsConfig",
    "ModelConfig",
    "MuonConfig",
    "OptimizerFields",
    "PpoCkptConfig",
    "PpoConfig",
    "PpoDsConfig",
    "PpoEvalConfig",
    "PpoTrainConfig",
    "PreferenceDataConfig",
    "PromptDataConfig",
    "PushConfig",
    "RefConfig",
    "RefModelConfig",
    "RefServeConfig",
    "RewardConfig",
    "RewardServeConfig",
    "RewardSourceFields",
    "RmConfig",
    "RmDsConfig",
    "RmModelConfig",
    "RolloutConfig",
    "RolloutEngineConfig",
    "RolloutServeConfig",
    "RpcConfig",
    "RunConfig",
    "ServeConfig",
    "SftConfig",
    "SftDataConfig",
    "SftModelConfig",
    "TokenizerFields",
    "TrainConfig",
    "TrainerConfig",
    "VllmConfig",
    "VllmEngineFields",
    "WandbConfig",
]

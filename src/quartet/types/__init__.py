"""Frozen value types that all rooms speak. `quartet.codec` turns them into messages and back.

Conventions, everywhere:

* Sequences are ragged: laid end to end in flat arrays of N = sum(lengths) elements.
* Every per-token array is aligned with `token_ids`: element t belongs to token t. The
  log-probability of token t is that given the tokens before it; it is 0 for the first token of a
  sequence, which nothing predicts.
* `action_mask` is 1 on the tokens that the policy chose and that are trained.
* Arrays are numpy, int32 for tokens and lengths, float32 for numbers, bool for masks.
"""

from quartet.types.info import LearnerInfo, RefInfo, RewardInfo, RolloutInfo, ServerInfo
from quartet.types.learner import (
    DpoLoss,
    ForwardOutput,
    ForwardResult,
    Head,
    KlLoss,
    Loss,
    MismatchCorrection,
    MuonConfig,
    OptimizerConfig,
    PairwiseLoss,
    PolicyLoss,
    RunSpec,
    ScheduleConfig,
    SftLoss,
    TrainResult,
    TrainSamples,
    TrainStep,
    ValueLoss,
)
from quartet.types.reward import Failure, Reward, ScoreBatch, ScoreItem, ScoreResult
from quartet.types.rollout import (
    Completion,
    FinishReason,
    GenerateResult,
    GroupCompletions,
    LogprobKind,
    LogprobSpec,
    PauseMode,
    PromptGroup,
    ReplicaState,
    SamplingParams,
    VersionSpan,
)
from quartet.types.sequences import SequenceBatch
from quartet.types.weights import (
    PushBackend,
    PushResult,
    ReceiveEvent,
    Rendezvous,
    ReplicaPushResult,
    TensorSpec,
    WeightManifest,
)

__all__ = [
    "Completion",
    "DpoLoss",
    "Failure",
    "FinishReason",
    "ForwardOutput",
    "ForwardResult",
    "GenerateResult",
    "GroupCompletions",
    "Head",
    "KlLoss",
    "LearnerInfo",
    "LogprobKind",
    "LogprobSpec",
    "Loss",
    "MismatchCorrection",
    "MuonConfig",
    "OptimizerConfig",
    "PairwiseLoss",
    "PauseMode",
    "PolicyLoss",
    "PromptGroup",
    "PushBackend",
    "PushResult",
    "ReceiveEvent",
    "RefInfo",
    "Rendezvous",
    "ReplicaPushResult",
    "ReplicaState",
    "Reward",
    "RewardInfo",
    "RolloutInfo",
    "RunSpec",
    "SamplingParams",
    "ScheduleConfig",
    "ScoreBatch",
    "ScoreItem",
    "ScoreResult",
    "SequenceBatch",
    "ServerInfo",
    "SftLoss",
    "TensorSpec",
    "TrainResult",
    "TrainSamples",
    "TrainStep",
    "ValueLoss",
    "VersionSpan",
    "WeightManifest",
]

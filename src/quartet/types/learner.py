"""What a learner is told and what it answers.

The losses mirror protos/quartet/api/learner/v1/loss.proto.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from quartet.types.rollout import LogprobSpec
from quartet.types.sequences import SequenceBatch

Aggregation = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]


class Head(StrEnum):
    """What sits on top of the transformer."""

    LM = "lm"
    VALUE = "value"
    REWARD = "reward"


class ForwardOutput(StrEnum):
    """What a Forward computes."""

    LOGPROBS = "logprobs"
    VALUES = "values"
    REWARDS = "rewards"


@dataclass(frozen=True, kw_only=True, slots=True)
class MismatchCorrection:
    """Correction of the difference between the engine that sampled and the learner."""

    level: Literal["token", "seq"]
    mode: Literal["mask", "clip"] = "mask"
    gating: Literal["ratio", "binary_kl", "tv"] = "ratio"
    threshold_low: float = 0.5
    threshold_high: float = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class KlLoss:
    """KL(policy || ref) as a term of the loss."""

    coef: float
    estimator: Literal["k1", "k2", "k3"] = "k1"
    unbiased_gradient: bool = False
    bound_all: bool = False
    """Values of every estimator within 10 and no gradient beyond, not of k3 alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """Policy loss. Needs action_mask, advantages and old_logprobs."""

    type: Literal["ppo", "gspo", "cispo"] = "ppo"
    eps_clip_low: float = 0.2
    eps_clip_high: float = 0.2
    dual_clip: float | None = None
    aggregation: Aggregation = "token-mean"
    aggregation_length: int = 0
    """Length of seq-mean-token-sum-norm, in tokens."""
    entropy_coef: float | None = None
    """None: no entropy; 0: computed and logged only."""
    kl_loss: KlLoss | None = None
    aux_loss_coef: float = 0.0
    mismatch_correction: MismatchCorrection | None = None
    temperature: float = 1.0
    """Divisor of the logits: the temperature that sampled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueLoss:
    """Value loss of a critic. Needs action_mask, returns and old_values."""

    value_clip: float | None = 0.5
    aggregation: Aggregation = "token-mean"
    aux_loss_coef: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SftLoss:
    """Negative log-likelihood of the tokens under action_mask, mean over the step's tokens."""

    aux_loss_coef: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PairwiseLoss:
    """Reward model loss. Sequences come in pairs: chosen, then rejected."""

    type: Literal["sigmoid", "logexp"] = "sigmoid"
    compute_in_fp32: bool = False
    aux_loss_coef: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DpoLoss:
    """Direct preference loss. Needs ref_logprobs. Pairs: chosen, then rejected."""

    beta: float = 0.1
    ipo: bool = False
    """IPO in place of DPO, of the mean log-probability of each answer's tokens."""
    ipo_sum: bool = False
    """IPO of the sums over the tokens: it then depends on how long the answers are."""
    label_smoothing: float = 0.0
    nll_loss_coef: float = 0.0
    aux_loss_coef: float = 0.0


Loss = PolicyLoss | ValueLoss | SftLoss | PairwiseLoss | DpoLoss


@dataclass(frozen=True, kw_only=True, slots=True)
class MuonConfig:
    """Muon settings."""

    lr: float = 0.02
    momentum: float = 0.95
    ns_steps: int = 5
    nesterov: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """Optimizer settings."""

    type: Literal["adam", "muon"] = "adam"
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    muon: MuonConfig | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """Learning rate over time."""

    name: str = "cosine_with_min_lr"
    total_steps: int = 1
    warmup_ratio: float = 0.03
    min_lr_ratio: float = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """What StartRun needs."""

    run_id: str
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    max_norm: float = 1.0
    seed: int = 42
    full_determinism: bool = False
    with_router_loss: bool = False
    """Losses of this run have an aux_loss_coef. A model without a router refuses the run."""
    ema_beta: float | None = None
    """Weight of the past in a moving average of the weights, which exports then hold; in [0, 1)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainSamples:
    """Samples of an optimizer step. Per-token arrays are [N], aligned with the tokens."""

    sequences: SequenceBatch
    action_mask: NDArray[np.bool_] | None = None
    advantages: NDArray[np.float32] | None = None
    old_logprobs: NDArray[np.float32] | None = None
    ref_logprobs: NDArray[np.float32] | None = None
    rollout_logprobs: NDArray[np.float32] | None = None
    returns: NDArray[np.float32] | None = None
    old_values: NDArray[np.float32] | None = None
    margins: NDArray[np.float32] | None = None  # [pairs]
    rollout_logprob_spec: LogprobSpec | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainStep:
    """Header of one optimizer step."""

    request_id: str
    run_id: str
    loss: Loss
    expected_optimizer_steps: int
    """Steps taken before this one; the learner answers ABORTED when it stands elsewhere."""
    max_tokens_per_micro_batch: int | None = None
    micro_batch_size: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """Answer of one optimizer step."""

    optimizer_steps: int
    applied: bool = True
    """False when the gradient was not finite: the weights did not change."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    grad_norm: float = 0.0
    lr: float = 0.0
    num_samples: int = 0
    num_action_tokens: int = 0
    num_tokens: int = 0
    num_micro_batches: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ForwardResult:
    """Answer of one Forward chunk."""

    chunk_id: str
    output: NDArray[np.float32]  # [N] or [B]
    entropy: NDArray[np.float32] | None = None  # [N]

"""Sections of the models: `actor`, `critic`, `ref`, `reward` (PPO) and `model` (SFT, RM, DPO).

An `address` left empty means that the trainer starts the service itself, on this machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from quartet.config.optim import AdamConfig, OptimizerFields

Aggregation = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorConfig(OptimizerFields):
    """The policy: its learner, its loss and its optimizer."""

    model_name_or_path: str | None = None
    """The policy to start from: a folder, or a name on the Hugging Face hub. The reference model
    and the rollout engines start from it too."""
    num_nodes: int = 1
    """Machines of the policy's learner."""
    num_gpus_per_node: int = 8
    """GPUs of the policy's learner on each machine."""
    gradient_checkpointing_enable: bool = False
    """Recompute activations in the backward pass, in policy and critic."""
    gradient_checkpointing_reentrant: bool = False
    """Use torch's reentrant form of it."""
    eps_clip: float = 0.2
    """PPO clips the ratio to [1 - eps, 1 + eps]."""
    eps_clip_low_high: tuple[float, float] | None = None
    """Two clip ranges, LOW HIGH; none means `eps_clip` for both."""
    dual_clip: float | None = None
    """Bound, above 1, of the loss where the advantage is negative (dual-clip PPO)."""
    policy_loss_type: Literal["ppo", "gspo", "cispo"] = "ppo"
    """ppo: ratio per token. gspo: per sequence. cispo: the clipped ratio is a weight, so that no
    token is without gradient."""
    loss_agg_mode: Aggregation = "token-mean"
    """How token losses become one number: the mean over tokens; or the mean over sequences of the
    mean, of the sum, or of the sum divided by `loss_agg_length` (Dr. GRPO). gspo always takes
    seq-mean-token-mean."""
    loss_agg_length: int | None = None
    """Tokens that seq-mean-token-sum-norm divides by. None: `rollout.max_new_tokens`, or
    `data.max_len` where there is none."""
    aux_loss_coef: float = 0.0
    """Weight of a mixture-of-experts router's balance loss, in the policy, and in a critic that
    starts from the same model."""
    entropy_coef: float | None = None
    """Entropy bonus. None: entropy is not computed. 0: it is computed and logged only."""
    freeze_visual_encoder: bool = False
    """Keep the vision part of a vision-language model as it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticConfig(OptimizerFields):
    """The critic of `algo.advantage.estimator gae`: a second learner with a value head."""

    adam: AdamConfig = field(default_factory=lambda: AdamConfig(lr=9e-6))
    """AdamW."""
    model_name_or_path: str | None = None
    """The model to start from. None: the reward model, or the policy where there is none."""
    num_nodes: int = 1
    """Machines of the critic's learner."""
    num_gpus_per_node: int = 8
    """GPUs of the critic's learner on each machine."""
    value_clip: float = 0.5
    """How far a value may move from the old one before its loss is clipped."""
    freezing_steps: int = -1
    """The policy is trained from rollout step N + 1 on; until then only the critic is."""
    save_value_network: bool = False
    """Export the critic too, at the end, to `<ckpt.output_dir>_critic`."""
    address: str | None = None
    """Critic learner to use, host:port."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RefConfig:
    """The frozen reference model, used when `algo.kl.init_coef` is not 0."""

    num_nodes: int = 1
    """Machines of the reference model."""
    num_gpus_per_node: int = 8
    """GPUs of the reference model on each machine."""
    offload: bool = False
    """Keep its weights in main memory and bring them to the GPU when needed."""
    address: str | None = None
    """Reference services to use, host:port, several with commas; `dns:///name:port` and
    `file:///path` stand for services that come and go."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardSourceFields:
    """Where rewards come from: a model, a Python file or HTTP endpoints."""

    model_name_or_path: str | None = None
    """Reward model: a sequence-classification model with one label."""
    remote_url: str | None = None
    """Other sources of rewards: one Python file with `reward_func`, or HTTP URLs with commas."""
    parts: tuple[str, ...] = ()
    """Several sources in place of one, added up: WEIGHT:SOURCE each. A source is math (compares the
    answer with the label), model:FOLDER_OR_NAME, a Python file, or a URL."""
    normalize_enable: bool = False
    """Turn the model's reward into (x - mean) / std, with `mean` and `std` of its config.json. The
    critic's values are then normalised in the same way."""
    offload: bool = False
    """Keep the reward model's weights in main memory."""
    timeout: float = 180.0
    """Seconds that one call of a reward function or HTTP endpoint may take."""
    num_workers: int = 2
    """Processes that run the reward function."""
    max_attempts: int = 5
    """Tries of an HTTP endpoint before the failure is reported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig(RewardSourceFields):
    """Rewards, and how they are shaped before advantages are computed."""

    num_nodes: int = 1
    """Machines of the reward model."""
    num_gpus_per_node: int = 8
    """GPUs of the reward model on each machine."""
    clip_range: tuple[float, float] = (-10.0, 10.0)
    """Bounds of the reward, LOW HIGH."""
    clip_after_baseline: bool = False
    """Clip what is left after the baseline is taken off, as OpenRLHF does. The clipped rewards of a
    group then no longer add up to 0."""
    overlong_buffer_len: float | None = None
    """Tokens before the length limit over which a penalty grows from 0 to its full size (DAPO)."""
    overlong_penalty_factor: float = 1.0
    """Full size of that penalty."""
    stop_properly_penalty_coef: float | None = None
    """For completions cut by the limit: in [0, 1] the reward is multiplied by it; below 0 it takes
    the reward's place. Never so that a reward rises."""
    stop_properly_legacy: bool = False
    """Let that penalty raise negative rewards, as OpenRLHF does."""
    address: str | None = None
    """Reward services to use, host:port, several with commas; `dns:///name:port` and
    `file:///path` stand for services that come and go."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The model that SFT, RM or DPO trains."""

    model_name_or_path: str | None = None
    """The model to start from: a folder, or a name on the Hugging Face hub."""
    gradient_checkpointing_enable: bool = False
    """Recompute activations in the backward pass."""
    gradient_checkpointing_reentrant: bool = False
    """Use torch's reentrant form of it."""
    aux_loss_coef: float = 0.0
    """Weight of a mixture-of-experts router's balance loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SftModelConfig(ModelConfig):
    """The model of supervised fine-tuning."""

    pretrain_mode_enable: bool = False
    """Continued pre-training: `data.input_key` is raw text and every token is trained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RmModelConfig(ModelConfig):
    """The reward model to be trained."""

    loss_type: str = "sigmoid"
    """sigmoid: -log sigmoid(chosen - rejected); logexp: log(1 + exp(rejected - chosen))."""
    compute_fp32_loss_enable: bool = False
    """Compute the pairwise loss in float32."""
    margin_loss_enable: bool = False
    """Subtract the data set's `margin` inside the sigmoid."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DpoModelConfig(ModelConfig):
    """The policy of direct preference optimisation."""

    beta: float = 0.1
    """Strength of the pull towards the reference model."""
    ipo_enable: bool = False
    """Use the IPO loss, of each answer's mean log-probability."""
    ipo_sum: bool = False
    """Let IPO take sums over the tokens, as OpenRLHF does; it then depends on lengths."""
    label_smoothing: float = 0.0
    """Share of pairs taken to be labelled the wrong way round (cDPO), in [0, 0.5)."""
    nll_loss_coef: float = 0.0
    """Weight of the chosen answer's negative log-likelihood."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DpoRefConfig:
    """The frozen reference model of DPO."""

    model_name_or_path: str | None = None
    """Reference model. None: the model that is trained, as it is at the start."""
    offload: bool = False
    """Keep its weights in main memory and bring them to the GPU when needed."""
    address: str | None = None
    """Reference services to use, host:port, several with commas; `dns:///name:port` and
    `file:///path` stand for services that come and go."""

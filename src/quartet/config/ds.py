"""Section `ds`: how models are loaded, and how DeepSpeed trains them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Low-rank adapters."""

    rank: int = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: int = 16
    """Scale of the adapters: alpha / rank."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Linear layers that get one: ends of their names, or all-linear for all but heads."""
    dropout: float = 0.0
    """Dropout in front of the adapters, while training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadConfig:
    """How a model is loaded; the whole section for services that do not train."""

    param_dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Type of the weights. On a CPU use fp32."""
    attn_implementation: str = "flash_attention_2"
    """Attention kernels."""
    experts_implementation: Literal["eager", "batched_mm", "grouped_mm", "deepgemm"] | None = None
    """Kernels of a mixture of experts. None: transformers decides."""
    load_in_4bit: bool = False
    """Load quantised weights (NF4) to train adapters on. Needs a GPU and bitsandbytes."""
    packing_samples: bool = False
    """Lay samples end to end instead of padding them. Memory depends on it, the result does
    not."""
    trust_remote_code: bool = False
    """Run Python code that comes with a model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadLoadConfig(LoadConfig):
    """How a model with a scalar head is loaded."""

    value_head_prefix: str = "score"
    """Name of the scalar head; `value_head_prefix` in the model's config.json wins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingFields(LoadConfig):
    """What the training engine needs besides."""

    zero_stage: int = 2
    """ZeRO stage: what is spread over the ranks. 0 nothing, 1 optimizer, 2 gradients, 3 weights."""
    zpg: int = 1
    """GPUs of a secondary weight partition (ZeRO++ hpZ)."""
    adam_offload: bool = False
    """Keep the optimizer's states, and its step, in main memory."""
    grad_accum_dtype: str | None = None
    """Type in which gradients are accumulated: fp32, bf16, fp16. None: fp32."""
    overlap_comm: bool = False
    """Reduce gradients while the backward pass goes on."""
    deepcompile: bool = False
    """DeepSpeed's compiler."""
    use_universal_ckpt: bool = False
    """Go on from a checkpoint of another number of ranks or another ZeRO stage."""
    tensor_parallel_size: int = 1
    """GPUs over which a layer's matrices are spread."""
    ring_attn_size: int = 1
    """GPUs over which a sequence is spread."""
    ring_attn_head_stride: int = 1
    """Heads per step of that ring."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Low-rank adapters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RmDsConfig(TrainingFields):
    """Training of a reward model."""

    value_head_prefix: str = "score"
    """Name of the scalar head; `value_head_prefix` in the model's config.json wins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LmDsConfig(TrainingFields):
    """Training of a language model: SFT and DPO."""

    use_liger_kernel: bool = False
    """Fused kernels of the package liger-kernel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PpoDsConfig(LmDsConfig):
    """Training of policy and critic; also what `quartet serve learner` reads."""

    enable_sleep: bool = False
    """Move models and optimizer states to main memory while others work; needs
    `train.colocate_all`."""
    value_head_prefix: str = "score"
    """Name of the scalar head; `value_head_prefix` in the model's config.json wins."""

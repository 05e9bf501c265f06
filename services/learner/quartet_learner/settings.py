"""What the learner needs to know from its configuration, checked and small enough to hand on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from quartet.config import LearnerServeConfig
from quartet.errors import ConfigError
from quartet.types import Head
from quartet_learner.parallel import RankLayout

ALL_LINEAR = "all-linear"
"""Target of adapters: every linear layer but the heads."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerSettings:
    """Model, head and training engine of one learner; the same on all its ranks."""

    model_name_or_path: str
    """Folder or hub name."""
    head: Head = Head.LM
    new_head: bool = False
    """Head value or reward: initialise it even if the folder has one."""
    value_head_prefix: str = "score"
    """Name of the scalar head's tensor; `value_head_prefix` in the model's config.json wins."""
    normalize: bool = False
    """Head value or reward: Forward gives (x - mean) / std, both from the model's config.json."""
    param_dtype: str = "float32"
    """torch name of the type of the weights."""
    attn_implementation: str = "sdpa"
    experts_implementation: str | None = None
    trust_remote_code: bool = False
    max_length: int = 0
    """Longest sequence in tokens; 0 is no limit but the model's."""
    packed: bool = False
    """Lay a micro-batch's sequences end to end instead of padding them."""
    gradient_checkpointing: bool = False
    gradient_checkpointing_reentrant: bool = False
    zero_stage: int = 0
    zpg: int = 1
    """ZeRO-3: ranks of a secondary weight partition."""
    adam_offload: bool = False
    """Optimizer states and step in main memory."""
    grad_accum_dtype: str | None = None
    overlap_comm: bool = False
    lora_rank: int = 0
    """Rank of the adapters; 0 trains all weights."""
    lora_alpha: int = 16
    """Adapters are scaled by alpha / rank."""
    lora_dropout: float = 0.0
    """Share of the inputs of an adapter that training leaves out."""
    lora_targets: tuple[str, ...] = (ALL_LINEAR,)
    """Ends of the names of the layers that get an adapter."""
    load_in_4bit: bool = False
    """Hold the frozen matrices in 4 bits."""
    tensor_parallel_size: int = 1
    """Ranks over which a matrix is spread."""
    ring_size: int = 1
    """Ranks over which a sequence is spread."""
    ring_head_stride: int = 1
    """Key-value heads that travel round the ring at a time."""
    use_liger_kernel: bool = False
    """Fused kernels of liger-kernel in the model's layers."""
    deepcompile: bool = False
    """Compile the model with DeepSpeed's passes."""
    num_ranks: int | None = None
    """Processes to start when no launcher has; None is one, or one for each visible GPU."""
    seed: int = 42
    full_determinism: bool = False

    def layout(self, world_size: int) -> RankLayout:
        """How that many ranks share the work; see `RankLayout.check`."""
        return RankLayout(
            world_size=world_size,
            tensor_size=self.tensor_parallel_size,
            ring_size=self.ring_size,
        )

    def to_json(self) -> str:
        """Text that `from_json` reads; how a rank hands its settings to the ranks it starts."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> LearnerSettings:
        """Read what `to_json` wrote."""
        fields = json.loads(text)
        typed = {"head": Head(fields["head"]), "lora_targets": tuple(fields["lora_targets"])}
        return cls(**{**fields, **typed})


def settings_from_config(config: LearnerServeConfig) -> LearnerSettings:
    """Pick and check what the learner needs.

    Raises:
        ConfigError: a setting that this learner cannot honour, by name, with what to do instead.
    """
    ds, learner = config.ds, config.learner
    if not learner.model_name_or_path:
        raise ConfigError(
            "the learner has no model",
            field="learner.model_name_or_path",
            remedy="give --learner.model_name_or_path a folder or a hub name",
        )
    _refuse_what_is_not_there(config)
    return LearnerSettings(
        model_name_or_path=learner.model_name_or_path,
        head=Head(learner.head),
        new_head=learner.new_head,
        value_head_prefix=ds.value_head_prefix,
        normalize=learner.normalize_enable,
        param_dtype=DTYPES[ds.param_dtype],
        attn_implementation=ds.attn_implementation,
        experts_implementation=ds.experts_implementation,
        trust_remote_code=ds.trust_remote_code,
        max_length=config.data.max_len,
        packed=ds.packing_samples,
        gradient_checkpointing=learner.gradient_checkpointing_enable,
        gradient_checkpointing_reentrant=learner.gradient_checkpointing_reentrant,
        zero_stage=ds.zero_stage,
        zpg=ds.zpg,
        adam_offload=ds.adam_offload,
        grad_accum_dtype=ds.grad_accum_dtype,
        overlap_comm=ds.overlap_comm,
        lora_rank=ds.lora.rank,
        lora_alpha=ds.lora.alpha,
        lora_dropout=ds.lora.dropout,
        lora_targets=ds.lora.target_modules,
        load_in_4bit=ds.load_in_4bit,
        tensor_parallel_size=ds.tensor_parallel_size,
        ring_size=ds.ring_attn_size,
        ring_head_stride=ds.ring_attn_head_stride,
        use_liger_kernel=ds.use_liger_kernel,
        deepcompile=ds.deepcompile,
        num_ranks=learner.num_ranks,
        seed=config.train.seed,
        full_determinism=config.train.full_determinism_enable,
    )


def _refuse_what_is_not_there(config: LearnerServeConfig) -> None:
    """Raise ConfigError for the first setting that this learner cannot honour."""
    ds, learner = config.ds, config.learner
    off: list[tuple[str, object, bool, str]] = [
        ("ds.zero_stage", ds.zero_stage, ds.zero_stage not in (0, 1, 2, 3), "use 0, 1, 2 or 3"),
        (
            "learner.num_ranks",
            learner.num_ranks,
            learner.num_ranks is not None and learner.num_ranks < 1,
            "use 1 or more",
        ),
        (
            "learner.freeze_visual_encoder",
            learner.freeze_visual_encoder,
            learner.freeze_visual_encoder,
            "leave it off: the learner trains models of text",
        ),
    ]
    for name, value, wrong, remedy in off:
        if wrong:
            raise ConfigError(
                f"the learner cannot do {name} = {value}",
                field=name,
                value=str(value),
                remedy=remedy,
            )

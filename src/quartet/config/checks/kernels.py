"""Kernels and the ways to spread a model: what goes with what. Looks at no machine."""

from __future__ import annotations

from collections.abc import Iterator

from quartet.config.ds import TrainingFields
from quartet.config.tree import wrong
from quartet.errors import ConfigError

RING_KERNELS = ("sdpa", "flash_attention_2")
"""Attention that works in a ring."""
SHARDED_STAGES = (1, 2, 3)
"""ZeRO stages that DeepSpeed's compiler has passes for."""


def check_kernels(ds: TrainingFields) -> Iterator[ConfigError]:
    """Attention, ring, tensor groups and the compiler."""
    if ds.ring_attn_size > 1:
        yield from _check_ring(ds)
    elif ds.ring_attn_head_stride != 1:
        yield wrong(
            "ds.ring_attn_head_stride",
            ds.ring_attn_head_stride,
            "there is no ring",
            "add --ds.ring_attn_size, or leave the flag away",
        )
    if ds.tensor_parallel_size > 1 and ds.load_in_4bit:
        yield wrong(
            "ds.load_in_4bit",
            None,
            "DeepSpeed cannot cut quantised matrices",
            "leave --ds.tensor_parallel_size at 1",
        )
    if ds.deepcompile:
        yield from _check_compiler(ds)


def _check_ring(ds: TrainingFields) -> Iterator[ConfigError]:
    if not ds.packing_samples:
        yield wrong(
            "ds.ring_attn_size",
            ds.ring_attn_size,
            "the ring cuts packed sequences",
            "add --ds.packing_samples",
        )
    if ds.attn_implementation not in RING_KERNELS:
        yield wrong(
            "ds.attn_implementation",
            ds.attn_implementation,
            "does not work in a ring",
            f"take {' or '.join(RING_KERNELS)}",
        )


def _check_compiler(ds: TrainingFields) -> Iterator[ConfigError]:
    obstacle: tuple[str, str] | None = None
    if ds.zero_stage not in SHARDED_STAGES:
        obstacle = f"has no passes for ZeRO stage {ds.zero_stage}", "set --ds.zero_stage 1, 2 or 3"
    elif ds.tensor_parallel_size > 1:
        obstacle = (
            "does not compile ZeRO and tensor groups together",
            "leave --ds.tensor_parallel_size at 1",
        )
    elif ds.ring_attn_size > 1:
        obstacle = (
            "cannot compile the collectives of a ring",
            "leave --ds.ring_attn_size at 1",
        )
    elif ds.lora.rank > 0 or ds.load_in_4bit:
        obstacle = "is for models that are trained whole", "leave --ds.lora.rank at 0"
    if obstacle is not None:
        yield wrong("ds.deepcompile", None, *obstacle)

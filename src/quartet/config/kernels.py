"""Kernels that a machine must have: GPUs, and packages that only make sense beside them."""

from __future__ import annotations

from collections.abc import Iterator

from quartet.config.ds import LoadConfig, TrainingFields
from quartet.config.machine import Machine
from quartet.config.tree import wrong
from quartet.errors import ConfigError


def kernel_obstacles(ds: LoadConfig, machine: Machine) -> Iterator[ConfigError]:
    """What keeps models from being loaded, and trained, with these kernels on this machine.

    Without a GPU flash attention is no obstacle: sdpa takes its place, and the service says so. On
    a machine with GPUs the default, version 2, is replaced too where its package is missing.
    """
    if machine.num_gpus:
        yield from _flash(ds, machine)
    if not isinstance(ds, TrainingFields):
        return
    if getattr(ds, "use_liger_kernel", False):
        yield from _liger(machine)
    if ds.deepcompile and machine.num_gpus == 0:
        yield wrong(
            "ds.deepcompile", None, "DeepSpeed's compiler needs a GPU", "leave the flag away"
        )
    ring_of_flash = ds.ring_attn_size > 1 and ds.attn_implementation == "flash_attention_2"
    if ring_of_flash and machine.num_gpus and not machine.has_ring_attention:
        yield wrong(
            "ds.ring_attn_size",
            ds.ring_attn_size,
            "a ring of flash attention needs the package ring_flash_attn",
            "install it, or take --ds.attn_implementation sdpa",
        )


def _flash(ds: LoadConfig, machine: Machine) -> Iterator[ConfigError]:
    wanted = ds.attn_implementation
    if not wanted.startswith("flash_attention"):
        return
    if wanted == "flash_attention_3" and not machine.has_flash_attention_3:
        yield wrong(
            "ds.attn_implementation",
            wanted,
            "needs the package flash_attn_interface (flash-attn-3)",
            "install it, or take flash_attention_2 or sdpa",
        )
    elif ds.param_dtype == "fp32" and (
        wanted == "flash_attention_3" or machine.has_flash_attention
    ):
        yield wrong(
            "ds.attn_implementation",
            wanted,
            "computes in bf16 and fp16 only, and the weights are fp32",
            "set --ds.param_dtype bf16, or take --ds.attn_implementation sdpa",
        )


def _liger(machine: Machine) -> Iterator[ConfigError]:
    why = ""
    if machine.num_gpus == 0:
        why = "its kernels need a GPU"
    elif not machine.has_liger:
        why = "the packages liger_kernel and triton are not installed"
    if why:
        yield wrong("ds.use_liger_kernel", None, why, "leave the flag away")

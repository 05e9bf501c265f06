"""What this machine has, found out without torch."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The machine that the trainer, and the services that it starts, run on."""

    num_gpus: int = 0
    """Visible GPUs."""
    has_vllm: bool = False
    """True when the package vllm is installed for the rollout services."""
    has_flash_attention: bool = False
    """True when the package flash_attn is installed."""
    has_flash_attention_3: bool = False
    """True when the package flash_attn_interface is installed."""
    has_ring_attention: bool = False
    """True when the package ring_flash_attn is installed."""
    has_liger: bool = False
    """True when the packages liger_kernel and triton are installed."""
    has_bitsandbytes: bool = False
    """True when the package bitsandbytes is installed."""


def this_machine(
    environ: Mapping[str, str] | None = None, *, engine_python: str | None = None
) -> Machine:
    """Look at devices and installed packages. Imports neither torch nor vLLM.

    Args:
        environ: Environment variables; None takes this process's.
        engine_python: Python of the rollout services; None is this one.
    """
    return Machine(
        num_gpus=_visible_gpus(os.environ if environ is None else environ),
        has_vllm=_has_package("vllm", engine_python),
        has_flash_attention=find_spec("flash_attn") is not None,
        has_flash_attention_3=find_spec("flash_attn_interface") is not None,
        has_ring_attention=find_spec("ring_flash_attn") is not None,
        has_liger=all(find_spec(name) is not None for name in ("liger_kernel", "triton")),
        has_bitsandbytes=find_spec("bitsandbytes") is not None,
    )


def _has_package(name: str, python: str | None) -> bool:
    """Whether a Python finds a package. Does not import it."""
    if python is None:
        return find_spec(name) is not None
    question = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    try:
        return subprocess.run([python, "-c", question], check=False, timeout=30).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _visible_gpus(environ: Mapping[str, str]) -> int:
    """GPUs of the driver, as far as CUDA_VISIBLE_DEVICES shows them."""
    present = sum(1 for device in Path("/dev").glob("nvidia[0-9]*"))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    listed = [entry for entry in visible.split(",") if entry.strip() not in ("", "-1")]
    return min(present, len(listed))

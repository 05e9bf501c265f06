"""Fused kernels of the package liger-kernel, in the layers of a loaded model."""

from __future__ import annotations

from typing import Any

from quartet.errors import ConfigError


def apply_liger(hf: Any) -> None:
    """Replace norms, rotary embeddings and the gated feed-forward by Liger's Triton kernels.

    Its fused losses stay off: log-probabilities come from hidden states, see `quartet.nn.logprobs`.

    Raises:
        ConfigError: the package cannot be loaded, or has nothing for this model.
    """
    try:
        from liger_kernel.transformers.monkey_patch import (  # pyright: ignore[reportMissingImports] - only with a GPU
            MODEL_TYPE_TO_APPLY_LIGER_FN,
            _apply_liger_kernel_to_instance,
        )
    except ImportError as error:
        raise ConfigError(
            f"liger-kernel cannot be loaded: {error}",
            field="ds.use_liger_kernel",
            remedy="install liger-kernel and triton, or leave the flag away",
        ) from error
    kind = hf.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(
            f"liger-kernel has no kernels for a model of type {kind}",
            field="ds.use_liger_kernel",
            remedy="leave the flag away",
        )
    _apply_liger_kernel_to_instance(model=hf, cross_entropy=False, fused_linear_cross_entropy=False)

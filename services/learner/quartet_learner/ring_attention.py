"""Attention over a ring of ranks, as one of transformers' attention implementations.

Two kernels: sdpa, one call for each sequence that a slice touches, on any device; and the flash
attention of the package ring_flash_attn. That package's own patch of transformers does not fit
version 5, so its functions are called from here, where anyone may register an implementation.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from quartet.errors import ConfigError
from quartet.nn.attention import NAME as CAUSAL
from quartet_learner.ring import Ring

NAME = "quartet_ring"
"""Under which transformers knows it."""
_NAME_OF_OLD = "is_flash_attn_greater_or_equal_2_10"
LAYER_TYPES = {"full_attention", "sliding_attention"}

Kernel = Callable[[Ring, Tensor, Tensor, Tensor, float | None, int | None], Tensor]
"""(ring, queries [width, heads, dim], keys [width, kv heads, dim], values, scale, window) ->
[width, heads, dim]."""


def install(hf: Any, ring: Ring) -> None:
    """Let a loaded model attend over `ring`.

    Args:
        hf: the transformers model, loaded with the kernels that would work on one rank.
        ring: of this rank.

    Raises:
        ConfigError: the model, or these kernels, cannot work in a ring.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    check_model(hf, ring.head_stride)
    kernel = kernel_of(hf.config._attn_implementation)

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        if attention_mask is not None:
            raise RuntimeError("a ring attends over packed rows, which have no mask")
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
        return kernel(ring, q, k, v, scaling, sliding_window)[None], None

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _no_mask)
    hf.set_attn_implementation(NAME)


def kernel_of(attn_implementation: str) -> Kernel:
    """The kernel for a name of transformers; ConfigError for one that has none."""
    if attn_implementation in ("sdpa", CAUSAL):
        return sdpa
    if attn_implementation == "flash_attention_2":
        return flash
    raise ConfigError(
        "a ring attends with sdpa or flash_attention_2",
        field="ds.attn_implementation",
        value=attn_implementation,
        remedy="use one of them, or leave --ds.ring_attn_size at 1",
    )


def check_model(hf: Any, head_stride: int) -> None:
    """Raise ConfigError for a model whose attention cannot be spread over a ring."""
    config = hf.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    reason = ""
    if not hf._supports_attention_backend:
        reason = "computes attention in a way of its own"
    elif getattr(config, "attn_logit_softcapping", None):
        reason = "caps its attention scores"
    elif not set(getattr(config, "layer_types", None) or ()) <= LAYER_TYPES:
        reason = "has layers that are not attention"
    if reason:
        raise ConfigError(
            f"the model ({config.model_type}) {reason}, which a ring cannot do",
            field="ds.ring_attn_size",
            remedy="leave --ds.ring_attn_size at 1",
        )
    if heads % head_stride:
        raise ConfigError(
            f"the model's {heads} key-value heads cannot be taken {head_stride} at a time",
            field="ds.ring_attn_head_stride",
            value=str(head_stride),
            remedy=f"use a number that divides {heads}",
        )


def sdpa(
    ring: Ring, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
) -> Tensor:
    """One call of torch's attention for each sequence in this rank's slice."""
    repeat = query.shape[1] // key.shape[1]
    outputs: list[Tensor] = []
    for first in range(0, key.shape[1], ring.head_stride):
        heads = slice(first, first + ring.head_stride)
        both = ring.gather(torch.stack([key[:, heads], value[:, heads]], dim=1))
        keys, values = both.repeat_interleave(repeat, dim=2).unbind(1)
        queries = query[:, first * repeat : (first + ring.head_stride) * repeat]
        parts = [
            _attend_to(queries[a:b], keys[begin:end], values[begin:end], scale, window)
            for a, b, begin, end in segments(ring)
        ]
        outputs.append(torch.cat(parts))
    return torch.cat(outputs, dim=1)


def segments(ring: Ring) -> Iterator[tuple[int, int, int, int]]:
    """For each sequence that this rank's slice touches: what to attend, (a, b, begin, end).

    Queries are [a, b) of the slice, keys [begin, end) of the row; the last query is that of the
    last key.
    """
    piece = ring.current
    stop = piece.start + piece.width
    for begin, end in zip(piece.bounds, piece.bounds[1:], strict=False):
        first, last = max(begin, piece.start), min(end, stop)
        if first < last:
            yield first - piece.start, last - piece.start, begin, last


def _attend_to(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
) -> Tensor:
    """Causal attention of the last tokens of a sequence, [n, heads, dim] each."""
    before = len(key) - len(query)
    mask = None
    if before or (window is not None and len(key) > window):
        here = torch.arange(before, len(key), device=key.device)[:, None]
        there = torch.arange(len(key), device=key.device)[None]
        mask = there <= here
        if window is not None:
            mask &= there > here - window
    q, k, v = (t.transpose(0, 1)[None] for t in (query, key, value))
    out = nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale
    )
    return out[0].transpose(0, 1)


def flash(
    ring: Ring, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
) -> Tensor:
    """The flash attention of ring_flash_attn, over the same slices."""
    package = _ring_flash_attn()
    cu_q, cu_k, longest_q, longest_k, keys = ring.once_a_pass(
        lambda: package.llama3_flash_attn_prepare_cu_seqlens(
            torch.tensor(ring.current.bounds, dtype=torch.int32, device=query.device),
            True,
            ring.rank,
            ring.size,
        )
    )
    return package.llama3_flash_attn_varlen_func(
        query,
        key,
        value,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        max_seqlen_q=longest_q,
        max_seqlen_k=longest_k,
        heads_k_stride=ring.head_stride,
        local_k_slice=keys,
        softmax_scale=scale,
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        group=ring.group,
    )


def _ring_flash_attn() -> Any:
    """Import the package; its patch of transformers asks for a name that version 5 has not."""
    from transformers import modeling_flash_attention_utils as utils

    if not hasattr(utils, _NAME_OF_OLD):
        setattr(utils, _NAME_OF_OLD, True)
    return importlib.import_module("ring_flash_attn")


def _no_mask(*_: Any, **__: Any) -> None:
    """Say that there is no mask: transformers would make one of the slice alone."""

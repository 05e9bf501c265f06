"""Causal attention without a mask, for rows of one sequence and rows of many.

transformers gives sdpa a [width, width] mask where rows are padded or packed. Neither needs one:
padding stands on the right, where no token before it looks, and the sequences of a packed row can
be attended one after the other. So time and memory of attention go with the sum of the squared
lengths, not with the square of their sum.

The function here is registered with transformers under `NAME`. It gives what sdpa gives with masks,
on every token that is not padding.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from quartet.errors import FatalError

if TYPE_CHECKING:
    import torch

    from quartet.nn.inputs import ModelInputs

NAME = "quartet_causal"
_KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Kinds of attention in a transformers config that this function computes."""


def use_causal_attention(model: Any) -> bool:
    """Let `model` (of transformers, with sdpa) attend without masks, if it can.

    Returns:
        Whether it does now. A model whose layers do something else than plain or sliding causal
        attention through transformers' attention interface is left as it is.
    """
    if model.config._attn_implementation != "sdpa" or not _is_plain(model):
        return False
    _register()
    model.set_attn_implementation(NAME)
    return True


def attention_arguments(model: Any, inputs: ModelInputs) -> dict[str, Any]:
    """What `model.base_model` must be given beside ids, mask and positions."""
    if model.config._attn_implementation != NAME:
        return {}
    return {"packed_lengths": inputs.packed_lengths}


def _is_plain(model: Any) -> bool:
    config = model.config
    if config.get_text_config() is not config or config.is_encoder_decoder:
        return False
    if not set(getattr(config, "layer_types", None) or ()) <= _KNOWN_LAYERS:
        return False
    takes = inspect.signature(model.base_model.forward).parameters.values()
    return bool(getattr(model, "_supports_attention_backend", False)) and any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in takes
    )


@cache
def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, causal_attention)


def causal_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed_lengths: Sequence[int] | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each row, or within each sequence of a packed row.

    Args:
        module: the layer, which says whether it is causal.
        query: [rows, heads, width, size].
        key: [rows, key heads, width, size]; a group of heads shares one.
        value: likewise.
        attention_mask: None: transformers makes no mask for this function.
        dropout: probability that a weight is dropped.
        scaling: of the scores; None is 1 / sqrt(size).
        sliding_window: a token sees so many, itself included; None sees all before it.
        packed_lengths: lengths of the sequences of the one row; empty where rows are not packed.
        others: what transformers hands to every attention function.

    Returns:
        [rows, width, heads, size], and None in place of the weights.

    Raises:
        FatalError: the model calls this in a way that it was not written for.
    """
    _check(module, attention_mask, packed_lengths, others)
    if not packed_lengths:
        out = _attend(query, key, value, dropout, scaling, sliding_window)
        return out.transpose(1, 2).contiguous(), None
    import torch

    # split, not slices: the gradient of each slice would be as long as the whole row.
    parts = zip(*(x.split(list(packed_lengths), dim=2) for x in (query, key, value)), strict=True)
    attended = [_attend(q, k, v, dropout, scaling, sliding_window) for q, k, v in parts]
    return torch.cat([out.transpose(1, 2) for out in attended], dim=1), None


def _check(
    module: Any, mask: Any, packed_lengths: Sequence[int] | None, others: dict[str, Any]
) -> None:
    extras = [
        name for name in ("softcap", "position_bias", "s_aux") if others.get(name) is not None
    ]
    if not getattr(module, "is_causal", True) or others.get("is_causal") is False:
        extras.append("is_causal")
    if mask is not None:
        extras.append("attention_mask")
    if packed_lengths is None or extras:
        problem = f"uses {', '.join(extras)}" if extras else "does not say which rows are packed"
        raise FatalError(
            f"{type(module).__name__} {problem}, which attention without masks cannot do",
            reason="ATTENTION_NOT_KNOWN",
            remedy="choose another implementation with --ds.attn_implementation eager",
        )


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    """[rows, heads, width, size] of causal attention within each row."""
    import torch

    width = query.shape[2]
    mask = None
    if sliding_window is not None and width > sliding_window:
        places = torch.arange(width, device=query.device)
        behind = places[:, None] - places[None, :]
        mask = (behind >= 0) & (behind < sliding_window)
    return torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None and width > 1,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )

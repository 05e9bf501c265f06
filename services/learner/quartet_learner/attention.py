"""What transformers' attention has to be told about a packed row."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from quartet.errors import ConfigError
from quartet.nn import ModelInputs


def packed_arguments(inputs: ModelInputs, attn_implementation: str) -> dict[str, Any]:
    """FlashAttentionKwargs of a packed row: where its sequences begin and end, and their longest.

    Without them flash attention would find the same from the position ids again in every layer,
    each time waiting for the device. Other implementations get nothing here: see
    `quartet.nn.attention`.

    Args:
        inputs: packed or padded.
        attn_implementation: name under which transformers knows it.
    """
    if not inputs.packed_lengths or not attn_implementation.startswith("flash_attention"):
        return {}
    ends = itertools.accumulate(inputs.packed_lengths, initial=0)
    bounds = torch.tensor(list(ends), dtype=torch.int32, device=inputs.input_ids.device)
    longest = max(inputs.packed_lengths)
    return {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def check_packing(hf: Any) -> None:
    """Raise ConfigError for a model that carries a state along a row, past a sequence's end.

    Attention is kept within a sequence by its mask or bounds; a recurrent layer is not.
    """
    kinds = set(getattr(hf.config.get_text_config(), "layer_types", None) or ())
    recurrent = kinds - {"full_attention", "sliding_attention", "chunked_attention"}
    if recurrent or getattr(hf, "_is_stateful", False):
        what = ", ".join(sorted(recurrent)) or "a recurrent state"
        raise ConfigError(
            f"the model ({hf.config.model_type}) has {what}, which would let packed sequences see "
            "each other",
            field="ds.packing_samples",
            remedy="leave the flag away",
        )

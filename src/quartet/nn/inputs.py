"""Ragged sequences as the input of a transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from quartet.nn.attention import attention_arguments

if TYPE_CHECKING:
    import torch

    from quartet.types import SequenceBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInputs:
    """B sequences with N tokens in all, laid out for a transformer.

    Padded: one row a sequence, padded on the right, with an attention mask. Packed: one row for
    all, told apart by `position_ids` that start again at 0; then there must be no attention mask,
    because transformers takes an all-ones mask as one long sequence and lets them see each other.
    """

    input_ids: torch.Tensor
    """[rows, width] int64."""
    attention_mask: torch.Tensor | None
    """[rows, width] int64, or None when packed."""
    position_ids: torch.Tensor
    """[rows, width] int64."""
    places: torch.Tensor
    """[N] int64: where each token of the flat arrays sits in the flattened [rows * width]."""
    packed_lengths: tuple[int, ...] = ()
    """Lengths of the sequences in the one row when packed, else empty."""


def model_inputs(
    sequences: SequenceBatch, *, packed: bool, device: torch.device | str, pad_token_id: int = 0
) -> ModelInputs:
    """Lay out `sequences`; an empty batch is not allowed.

    Args:
        sequences: at least one sequence.
        packed: one row without padding, or one row a sequence.
        device: where the tensors go.
        pad_token_id: fills the padding; never looked at.
    """
    import torch

    lengths = sequences.lengths.astype(np.int64)
    within = np.concatenate([np.arange(n, dtype=np.int64) for n in lengths])
    if packed:
        ids = sequences.token_ids.astype(np.int64)[None]
        positions = within[None]
        places = np.arange(ids.size, dtype=np.int64)
        mask = None
    else:
        width = int(lengths.max())
        rows = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
        places = rows * width + within
        ids = np.full(len(lengths) * width, pad_token_id, dtype=np.int64)
        ids[places] = sequences.token_ids
        ids = ids.reshape(len(lengths), width)
        positions = np.broadcast_to(np.arange(width, dtype=np.int64), ids.shape).copy()
        mask = (positions < lengths[:, None]).astype(np.int64)
    return ModelInputs(
        input_ids=torch.from_numpy(ids).to(device),
        attention_mask=None if mask is None else torch.from_numpy(mask).to(device),
        position_ids=torch.from_numpy(positions).to(device),
        places=torch.from_numpy(places).to(device),
        packed_lengths=tuple(lengths.tolist()) if packed else (),
    )


def hidden_states(model: Any, inputs: ModelInputs) -> torch.Tensor:
    """Run `model` (any transformers model) without its head.

    Returns:
        [N, hidden] last hidden states, after the final norm, of the tokens in flat order.
    """
    base = model.base_model
    out = base(
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        position_ids=inputs.position_ids,
        use_cache=False,
        **attention_arguments(model, inputs),
    )
    return out.last_hidden_state.flatten(0, 1).index_select(0, inputs.places)

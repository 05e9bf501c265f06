"""Digest of a model's weights, by which services tell whether they hold the same ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quartet.weights.digest import PushDigest, bucket_digest

if TYPE_CHECKING:
    import torch


def model_digest(model: torch.nn.Module) -> str:
    """Lower-case hex digest over all parameters in the order of the model, each counted once.

    Depends on the dtype as loaded: bf16 and fp32 copies of one model differ.
    """
    digest = PushDigest()
    for _, parameter in model.named_parameters():
        digest.update(bucket_digest(parameter))
    return digest.hexdigest()

"""The balance loss of a router (Switch Transformers, arXiv:2101.03961, equations 4 to 6).

For one sequence, over all its tokens and all layers together, with E experts and k of them taken
by each token:

    E * sum_e (assignments to e / tokens) * (mean router probability of e)

which is k where all experts are used alike. It is `load_balancing_loss_func` of transformers on
that sequence alone. The loss is not linear in the batch, so one over a micro-batch would depend
on the cut; here the loss of a step is the mean over its sequences, weighted by their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def balance_by_sequence(
    router_logits: Sequence[Tensor],
    places: Tensor,
    owners: Tensor,
    num_sequences: int,
    top_k: int,
) -> Tensor:
    """[num_sequences] fp32 balance loss of each sequence; differentiable.

    Args:
        router_logits: one tensor a layer, [rows * width, E] or [rows, width, E].
        places: [N] int64: where each token sits in the flattened rows.
        owners: [N] int64: the sequence that each token belongs to.
        num_sequences: sequences in all; one without a token has loss 0.
        top_k: experts that a token is sent to.
    """
    num_experts = router_logits[0].shape[-1]
    shape = (num_sequences, num_experts)
    device = router_logits[0].device
    assigned = torch.zeros(shape, dtype=torch.float32, device=device)
    mass = torch.zeros(shape, dtype=torch.float32, device=device)
    for layer in router_logits:
        logits = layer.reshape(-1, num_experts).index_select(0, places)
        probabilities = logits.float().softmax(-1)
        chosen = probabilities.detach().topk(top_k, dim=-1).indices
        taken = torch.zeros_like(probabilities).scatter_(-1, chosen, 1.0)
        assigned = assigned.index_add(0, owners, taken)
        mass = mass.index_add(0, owners, probabilities)
    tokens = torch.bincount(owners, minlength=num_sequences).clamp(min=1) * len(router_logits)
    return num_experts * (assigned * mass).sum(-1) / tokens.float().square()

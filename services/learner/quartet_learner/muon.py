"""Muon for matrices and AdamW for the rest, as one optimizer (kellerjordan.github.io/posts/muon).

Muon moves a matrix [a, b] along its momentum with all singular values brought near 1 (Newton-Schulz
iterations in bf16), by lr * sqrt(max(1, a / b)). It needs whole gradients of whole matrices, which
only ZeRO stage 0 has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from quartet.types import MuonConfig, OptimizerConfig


class MuonWithAdamW(torch.optim.Optimizer):
    """torch's Muon and AdamW side by side. A schedule scales both rates alike.

    Attributes:
        parts: the optimizers inside; they own states and groups.
    """

    def __init__(
        self, adamw: torch.optim.AdamW, muon: torch.optim.Muon, defaults: dict[str, Any]
    ) -> None:
        """Join two optimizers; `defaults["lr"]` is that of AdamW, which is the one reported."""
        self.parts: tuple[torch.optim.AdamW, torch.optim.Muon] = (adamw, muon)
        super().__init__([*adamw.param_groups, *muon.param_groups], defaults)
        self._share_groups()

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update matrices and the rest."""
        if closure is not None:
            raise TypeError("a closure is not supported")
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """The states of both."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the states of both."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._share_groups()

    def _share_groups(self) -> None:
        """Let whoever sets a rate here set it there: the groups are the same objects."""
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def matrices(hf: Any) -> dict[int, nn.Parameter]:
    """What Muon moves, by id: trained matrices, but not embeddings nor heads.

    Stacked matrices of experts, which have three dimensions, are left to AdamW.
    """
    tables = {id(m.weight) for m in hf.modules() if isinstance(m, nn.Embedding)}
    for head in (hf.get_output_embeddings(), getattr(hf, "score", None)):
        if head is not None:
            tables.add(id(head.weight))
    return {
        id(p): p for p in hf.parameters() if p.requires_grad and p.ndim == 2 and id(p) not in tables
    }


def build_muon(
    hf: Any, config: OptimizerConfig, muon: MuonConfig, adamw_groups: list[dict[str, Any]]
) -> MuonWithAdamW:
    """Muon for `matrices(hf)`, AdamW for what is left of `adamw_groups`."""
    by_muon = matrices(hf)
    rest = [
        {**group, "params": [p for p in group["params"] if id(p) not in by_muon]}
        for group in adamw_groups
    ]
    adamw = torch.optim.AdamW(
        [group for group in rest if group["params"]],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )
    return MuonWithAdamW(
        adamw,
        torch.optim.Muon(
            by_muon.values(),
            lr=muon.lr,
            momentum=muon.momentum,
            nesterov=muon.nesterov,
            ns_steps=muon.ns_steps,
            weight_decay=config.weight_decay,
            adjust_lr_fn="original",
        ),
        {"lr": config.lr},
    )

"""What the learner's unit tests share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quartet_learner.losses import StepCounts, TokenBatch

VECTORS = Path(__file__).parents[2] / "golden" / "vectors"


def load_vectors(name: str) -> dict[str, Any]:
    return json.loads((VECTORS / f"{name}.json").read_text())


def cases(name: str, *prefixes: str) -> list[Any]:
    """The cases of a file whose id starts with one of the prefixes, with the inputs filled in."""
    data = load_vectors(name)
    found = [
        {**case, "inputs": case.get("inputs", data["inputs"])}
        for case in data["cases"]
        if not prefixes or case["id"].startswith(prefixes)
    ]
    assert found
    return [pytest.param(case, id=case["id"]) for case in found]


class Padded:
    """Picks the trained tokens of padded [B, T] inputs and spreads gradients back."""

    def __init__(self, mask: list[list[float]]) -> None:
        self.mask = torch.tensor(mask).bool()
        self.segments = self.mask.nonzero()[:, 0]

    def pick(self, values: Any) -> torch.Tensor:
        tensor = torch.as_tensor(values, dtype=torch.float32)
        if tensor.ndim == 1:
            tensor = tensor[:, None].expand(self.mask.shape)
        return tensor[self.mask].clone()

    def spread(self, flat: torch.Tensor) -> torch.Tensor:
        return torch.zeros(self.mask.shape).masked_scatter(self.mask, flat)

    def batch(self, **fields: Any) -> TokenBatch:
        return TokenBatch(
            segments=self.segments,
            num_sequences=len(self.mask),
            **{name: self.pick(value) for name, value in fields.items()},
        )

    @property
    def counts(self) -> StepCounts:
        return StepCounts(
            tokens=int(self.mask.sum()), sequences=int(self.mask.any(1).sum()), pairs=0
        )


@pytest.fixture
def close() -> Callable[..., None]:
    def check(actual: Any, expected: Any, rtol: float = 2e-6, atol: float = 1e-7) -> None:
        torch.testing.assert_close(
            torch.as_tensor(actual, dtype=torch.float32).detach(),
            torch.as_tensor(expected, dtype=torch.float32),
            rtol=rtol,
            atol=atol,
        )

    return check

"""Expected numbers of `tests/vectors`, in ragged form."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

VECTORS = Path(__file__).parents[2] / "vectors"


@dataclass(frozen=True)
class Padded:
    """A padded [B, T] mask; cuts other padded tables to ragged form: rows of T tokens each."""

    mask: np.ndarray

    @classmethod
    def of(cls, mask: list[list[float]]) -> Padded:
        return cls(np.array(mask, dtype=bool))

    @property
    def flat_mask(self) -> np.ndarray:
        return self.mask.reshape(-1)

    @property
    def lengths(self) -> np.ndarray:
        return np.full(len(self.mask), self.mask.shape[1])

    def flat(self, table: Any) -> np.ndarray:
        return np.array(table, dtype=np.float64).reshape(-1)

    def assert_close(self, actual: np.ndarray, expected: Any, **tolerance: float) -> None:
        """Compare where the mask is 1, as the vectors' README demands."""
        wanted = self.flat(expected)[self.flat_mask]
        np.testing.assert_allclose(actual[self.flat_mask], wanted, **_tolerance(tolerance))


def _tolerance(given: dict[str, float]) -> dict[str, float]:
    return {"rtol": 2e-6, "atol": 1e-7, **given}


@pytest.fixture(scope="session")
def vectors() -> Callable[[str], dict[str, Any]]:
    """Read a file of expected numbers: inputs, and cases by id with their own inputs merged in."""

    def read(name: str) -> dict[str, Any]:
        content = json.loads((VECTORS / f"{name}.json").read_text())
        for case in content["cases"]:
            case["inputs"] = {**content["inputs"], **case.get("inputs", {})}
        return {case["id"]: case for case in content["cases"]}

    return read


@pytest.fixture(scope="session")
def padded() -> type[Padded]:
    return Padded

"""Command lines that several tests use."""

from __future__ import annotations

from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[2] / "golden" / "config"


@pytest.fixture
def ppo_line() -> list[str]:
    """The shortest line that passes all checks."""
    return [
        *("--actor.model_name_or_path", "org/policy"),
        *("--reward.model_name_or_path", "org/reward"),
        *("--data.prompt_dataset", "org/prompts"),
    ]


@pytest.fixture
def seed_line() -> list[str]:
    """The demo script of OpenRLHF for eight GPUs, flag by flag."""
    return (GOLDEN / "seed_line.txt").read_text(encoding="utf-8").split()

"""Fixtures that all tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from quartet.testing.tiny import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied-embedding Llama of about 100 thousand parameters with tokenizer and chat template."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_reward_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sequence classifier of one label, with the tokenizer of `tiny_model_dir`."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "reward", head="reward", seed=1)

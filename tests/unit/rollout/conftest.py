"""One loaded model for all tests of the engine, and helpers that ask transformers itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quartet_rollout.engines.transformers.model import CausalLm, load_model
from quartet_rollout.engines.transformers.sequence import Sequence

from quartet.config import RolloutServeConfig
from quartet.config.ds import LoadConfig
from quartet.config.sampling import RolloutEngineConfig
from quartet.types import LogprobKind, SamplingParams


@pytest.fixture(scope="session")
def serve_config(tiny_model_dir: Path) -> RolloutServeConfig:
    return RolloutServeConfig(
        rollout=RolloutEngineConfig(
            model_name_or_path=str(tiny_model_dir), engine="transformers", max_num_sequences=8
        ),
        ds=LoadConfig(param_dtype="fp32"),
    )


@pytest.fixture(scope="session")
def _loaded(serve_config: RolloutServeConfig) -> CausalLm:
    return load_model(serve_config)


@pytest.fixture
def model(_loaded: CausalLm) -> CausalLm:
    """A model of the test's own: it may change the weights."""
    return CausalLm(copy.deepcopy(_loaded.model), max_length=_loaded.max_length)


@pytest.fixture
def reference(_loaded: CausalLm) -> Callable[..., torch.Tensor]:
    """Logits of a full forward pass by transformers, [T, V], for any weights."""

    def logits(tokens: list[int], model: CausalLm | None = None) -> torch.Tensor:
        with torch.no_grad():
            return (model or _loaded).model(torch.tensor([tokens])).logits[0]

    return logits


@pytest.fixture
def greedy(_loaded: CausalLm) -> Callable[..., list[int]]:
    """What transformers' own generate answers without sampling."""

    def complete(prompt: tuple[int, ...], count: int, model: CausalLm | None = None) -> list[int]:
        ids = torch.tensor([prompt])
        out = (model or _loaded).model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count
        )
        return out[0, len(prompt) :].tolist()

    return complete


@pytest.fixture
def sequence(_loaded: CausalLm) -> Callable[..., Sequence]:
    def make(
        prompt: tuple[int, ...] = (5, 6, 7, 8),
        count: int = 8,
        *,
        seed: int = 0,
        kind: LogprobKind = LogprobKind.PROCESSED,
        stop: frozenset[int] | None = None,
        name: str = "",
        **sampling: float,
    ) -> Sequence:
        return Sequence(
            sample_id=name,
            prompt=prompt,
            seed=seed,
            sampling=SamplingParams(**({"min_new_tokens": 0} | sampling)),
            logprob_kind=kind,
            stop_ids=_loaded.eos_token_ids if stop is None else stop,
            max_tokens=count,
        )

    return make

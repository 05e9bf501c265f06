"""What the learner's unit tests share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quartet_learner.losses import StepCounts, TokenBatch

from quartet.types import OptimizerConfig

VECTORS = Path(__file__).parents[2] / "vectors"


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


@pytest.fixture(scope="session")
def group() -> Any:
    """This process as a learner's only rank."""
    import torch.distributed as dist
    from quartet_learner.group import join_group

    return join_group(dist.HashStore(), 0, 1)


@pytest.fixture
def make_engine(tiny_model_dir: Path, group: Any) -> Callable[..., Any]:
    """Makes a LearnerEngine that has started a run; keywords are settings, or of the run."""
    from quartet_learner.engine import LearnerEngine
    from quartet_learner.settings import LearnerSettings

    from quartet.types import RunSpec, ScheduleConfig

    def make(
        *,
        model: Path | str | None = None,
        lr: float = 1e-3,
        optimizer: OptimizerConfig | None = None,
        weight_decay: float = 0.0,
        schedule: ScheduleConfig | None = None,
        max_norm: float = 1.0,
        seed: int = 42,
        run_id: str = "run",
        full_determinism: bool = False,
        with_router_loss: bool = False,
        ema_beta: float | None = None,
        **settings: Any,
    ) -> LearnerEngine:
        source = str(model or tiny_model_dir)
        engine = LearnerEngine(LearnerSettings(model_name_or_path=source, **settings), group)
        engine.start_run(
            RunSpec(
                run_id=run_id,
                optimizer=optimizer or OptimizerConfig(lr=lr, weight_decay=weight_decay),
                schedule=schedule or ScheduleConfig(name="constant", total_steps=100),
                max_norm=max_norm,
                seed=seed,
                full_determinism=full_determinism,
                with_router_loss=with_router_loss,
                ema_beta=ema_beta,
            )
        )
        return engine

    return make


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    """Whole weights by name, copied, whatever the ZeRO stage."""
    from quartet_learner.weights import whole

    named = dict(engine.model.hf.named_parameters())
    with whole(named.values()):
        return {name: p.detach().float().cpu().clone() for name, p in named.items()}


@pytest.fixture(scope="session")
def tiny_moe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mixtral of four experts, two of which each token takes."""
    from transformers import MixtralConfig, MixtralForCausalLM

    folder = tmp_path_factory.mktemp("models") / "moe"
    config = MixtralConfig(
        vocab_size=384,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        MixtralForCausalLM(config).save_pretrained(folder)
    return folder

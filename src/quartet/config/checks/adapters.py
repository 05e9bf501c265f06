"""Low-rank adapters and quantised weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quartet.config.ds import TrainingFields
from quartet.config.optim import OptimizerFields
from quartet.config.tree import wrong
from quartet.errors import ConfigError

ALL_LINEAR = "all-linear"


def check_adapters(config: Any) -> Iterator[ConfigError]:
    """Adapters of a training configuration: what they are put on and what trains them."""
    ds: TrainingFields = config.ds
    yield from check_adapter_settings(ds)
    if ds.lora.rank == 0:
        return
    if isinstance(config, OptimizerFields):
        optimizers = {"": config.optim}
    else:
        optimizers = {"actor.": config.actor.optim, "critic.": config.critic.optim}
    for prefix, optim in optimizers.items():
        if optim == "muon":
            yield wrong(
                f"{prefix}optim",
                optim,
                "moves whole matrices, and adapters are factors of them",
                f"use --{prefix}optim adam, or --ds.lora.rank 0",
            )


def check_adapter_settings(ds: TrainingFields) -> Iterator[ConfigError]:
    """What any learner needs of the section `ds`."""
    targets = ds.lora.target_modules
    if not targets or (ALL_LINEAR in targets and len(targets) > 1):
        yield wrong(
            "ds.lora.target_modules",
            " ".join(targets),
            f"{ALL_LINEAR} stands alone, and something must be named",
            f"give {ALL_LINEAR}, or ends of names such as q_proj v_proj",
        )
    if ds.lora.rank > 0 and ds.tensor_parallel_size > 1:
        yield wrong(
            "ds.lora.rank",
            ds.lora.rank,
            "adapters do not go onto layers that are spread over GPUs",
            "set --ds.tensor_parallel_size 1, with --ds.zero_stage 3 for memory",
        )
    if not ds.load_in_4bit:
        return
    if ds.lora.rank == 0:
        yield wrong(
            "ds.load_in_4bit",
            None,
            "quantised weights cannot be trained, only adapters on them",
            "add --ds.lora.rank, for example 16",
        )
    if ds.zero_stage == 3:
        yield wrong(
            "ds.load_in_4bit",
            None,
            "ZeRO stage 3 cuts weights into parts, and quantised blocks must stay whole",
            "use --ds.zero_stage 2",
        )
    if ds.param_dtype != "bf16":
        yield wrong(
            "ds.load_in_4bit",
            None,
            f"quantised weights need bf16 beside them, not {ds.param_dtype}",
            "set --ds.param_dtype bf16",
        )

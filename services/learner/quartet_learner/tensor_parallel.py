"""Tensor parallelism with DeepSpeed's AutoTP: a layer's matrices spread over neighbouring ranks.

transformers says for each architecture which matrices are cut by columns and which by rows; AutoTP
cuts them and puts the collectives in. Embeddings, norms and the head stay whole on every rank, so
hidden states and log-probabilities are computed as they are without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from quartet.errors import ConfigError
from quartet_learner.settings import LearnerSettings

FIELD = "ds.tensor_parallel_size"
SPECS: dict[str, dict[str, Any]] = {
    "colwise": {"partition_type": "column"},
    "colwise_rep": {"partition_type": "column", "gather_output": True},
    "colwise_gather_output": {"partition_type": "column", "gather_output": True},
    "rowwise": {"partition_type": "row"},
    "replicated_with_grad_allreduce": {"partition_type": "skip", "grad_allreduce": True},
}
"""transformers' names of the ways to cut a matrix, as specs of AutoTP."""
WHOLE = {"embedding_rowwise", "replicate", "replicated"}
"""Ways that are left out: those matrices stay whole."""


def check_model(hf: Any, size: int) -> None:
    """Raise ConfigError for a model that cannot be spread over `size` ranks.

    DeepSpeed would cut what does not divide evenly; ranks without a head, or with halves of one,
    are the user's surprise rather than their wish.
    """
    plan = plan_of(hf)
    config = hf.config.get_text_config()
    unknown = sorted(set(plan.values()) - set(SPECS) - WHOLE)
    if unknown or not plan:
        why = f"cuts matrices as {', '.join(unknown)}" if unknown else "says not how it is cut"
        raise ConfigError(
            f"the model ({config.model_type}) {why}, which DeepSpeed cannot do",
            field=FIELD,
            value=str(size),
            remedy="leave it at 1 and spread the weights with --ds.zero_stage 3",
        )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        number = getattr(config, name, None)
        if number is not None and number % size:
            raise ConfigError(
                f"the model's {name} = {number} cannot be spread over {size} ranks",
                field=FIELD,
                value=str(size),
                remedy=f"use a divisor of {number}, or --ds.zero_stage 3",
            )


def plan_of(hf: Any) -> dict[str, str]:
    """What transformers says about the layers under the base model: pattern of names to style."""
    return dict(getattr(hf.config.get_text_config(), "base_model_tp_plan", None) or {})


def deepspeed_section(hf: Any, settings: LearnerSettings) -> dict[str, Any]:
    """The part of DeepSpeed's configuration that turns AutoTP on; empty without it."""
    if settings.tensor_parallel_size == 1:
        return {}
    specs = [
        {"patterns": [_pattern(name)], **SPECS[style]}
        for name, style in plan_of(hf).items()
        if style in SPECS
    ]
    return {
        "tensor_parallel": {
            "autotp_size": settings.tensor_parallel_size,
            "partition_config": {"use_default_specs": False, "layer_specs": specs},
        }
    }


def _pattern(name: str) -> str:
    """`layers.*.self_attn.q_proj` as the regular expression of its weight's full name."""
    return r"(.*\.)?" + re.escape(name).replace(r"\*", r"\d+") + r"\.weight$"


def trust_the_data(deepspeed: Any) -> None:
    """Skip AutoTP's comparison of the first batch on all ranks: it cannot compare our inputs.

    Ranks of a group get the same samples by construction, see `parallel.py`.
    """
    check = getattr(deepspeed, "first_dataloader_check", None)
    if check is not None:
        check.remove()


@contextmanager
def whole(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, parameters that AutoTP has cut have their full values on every rank. Collective.

    The cut value is put back as it was, the same memory: DeepSpeed's optimizers write into it.
    """
    cut = [(p, p.data) for p in parameters if is_cut(p)]
    for parameter, _ in cut:
        gather: Any = parameter.gather_params  # pyright: ignore[reportAttributeAccessIssue] - AutoTP's
        gather([parameter])
    try:
        yield
    finally:
        for parameter, part in cut:
            parameter.data = part


def is_cut(parameter: nn.Parameter) -> bool:
    """True for what AutoTP has cut: this rank holds a part of it."""
    return getattr(parameter, "ds_is_replaced_module", False)

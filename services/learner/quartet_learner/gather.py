"""Whole parameters, whatever the ranks hold of them: the one way to see what has been cut.

ZeRO-3 cuts every parameter over the data ranks, tensor parallelism matrices over its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from quartet_learner import tensor_parallel
from quartet_learner.group import RankGroup, import_deepspeed

Item = TypeVar("Item")

PORTION_BYTES = 256 << 20
"""Parameters that are whole at the same time."""


@contextmanager
def whole(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, these parameters have their full values on every rank, to be read only.

    Collective where ZeRO-3 or tensor parallelism has cut them.
    """
    wanted = list(parameters)
    partitioned = [p for p in wanted if hasattr(p, "ds_id")]
    gathered: AbstractContextManager[Any] = nullcontext()
    if partitioned:
        gathered = import_deepspeed().zero.GatheredParameters(partitioned, modifier_rank=None)
    with gathered, tensor_parallel.whole(wanted):
        yield


def is_cut(parameter: nn.Parameter) -> bool:
    """True for a parameter whose whole value is there only inside `whole`."""
    return hasattr(parameter, "ds_id") or tensor_parallel.is_cut(parameter)


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that an optimizer changes, by name; one name for those that are tied."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def visit_whole(
    parameters: Iterable[nn.Parameter],
    group: RankGroup,
    visit: Callable[[nn.Parameter, Tensor], None],
) -> None:
    """Call `visit` on rank 0 with each parameter and its whole value. Collective.

    The value is the parameter's own memory, good during the call only. Under ZeRO-3 parameters are
    gathered PORTION_BYTES at a time.
    """
    visit_items(
        parameters, lambda p: (p,), group, lambda parameter: visit(parameter, parameter.detach())
    )


def visit_items(
    items: Iterable[Item],
    parameters_of: Callable[[Item], Sequence[nn.Parameter]],
    group: RankGroup,
    visit: Callable[[Item], None],
) -> None:
    """Call `visit` on rank 0 with each item while its parameters are whole. Collective."""
    pending: list[Item] = []

    def fetch() -> None:
        with whole(p for item in pending for p in parameters_of(item)), torch.no_grad():
            if group.rank == 0:
                for item in pending:
                    visit(item)
        pending.clear()

    size = 0
    for item in items:
        pending.append(item)
        for parameter in parameters_of(item):
            count = int(getattr(parameter, "ds_numel", parameter.numel()))
            size += count * parameter.element_size()
        if size >= PORTION_BYTES:
            fetch()
            size = 0
    fetch()

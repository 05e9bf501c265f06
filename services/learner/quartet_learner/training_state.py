"""Where the numbers of a training state lie in DeepSpeed's engine, at every ZeRO stage.

An optimizer steps tensors that DeepSpeed calls differently at each stage: whole parameters at
stage 0, at the other stages this rank's share of all parameters, laid end to end in fp32. Here they
are `holders`, and a `Place` says which elements of which parameter lie where in one. Whoever moves
numbers by places need not know the stage.

This is the one file that knows how DeepSpeed 0.19.8 arranges them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

WEIGHT = "weight"
"""The kind of a parameter's own values; the other kinds are the optimizer's names of its states."""
STEP = "step"
"""The optimizer's state that is one number a holder."""
SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Elements [start, start + length) of a flattened parameter, from `offset` on in a holder."""

    name: str
    start: int
    length: int
    holder: Tensor
    offset: int

    def read(self, values: Tensor) -> Tensor:
        """[length] of `values`, which are laid out as the holder is."""
        return values.detach().reshape(-1).narrow(0, self.offset, self.length)

    def write(self, values: Tensor, part: Tensor) -> None:
        """Put [length] numbers where `read` finds them."""
        target = values.detach()
        if self.length == target.numel():
            target.copy_(part.view(target.shape))
        else:
            target.view(-1).narrow(0, self.offset, self.length).copy_(part)


def size_of(parameter: nn.Parameter) -> tuple[int, ...]:
    """Whole shape of a parameter, also where ZeRO-3 has partitioned it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def places(deepspeed: Any, trained: Mapping[str, nn.Parameter]) -> list[Place]:
    """What this rank's optimizer steps. At stage 0 each rank steps everything.

    Args:
        deepspeed: the engine.
        trained: parameters by name.
    """
    stage = deepspeed.zero_optimization_stage()
    if stage == 0:
        return [
            Place(name=name, start=0, length=p.numel(), holder=p, offset=0)
            for name, p in trained.items()
        ]
    of_stage = _place_of_zero_3 if stage == 3 else _place_of_zero_2
    found = (of_stage(deepspeed.optimizer, name, p) for name, p in trained.items())
    return [place for place in found if place is not None]


def states(deepspeed: Any, holder: Tensor) -> dict[str, Any]:
    """What the optimizer remembers of a holder; empty before its first step."""
    return _owner(deepspeed, holder).state.get(holder, {})


def make_states(deepspeed: Any, holder: Tensor, kinds: Iterable[str], step: int) -> dict[str, Any]:
    """Give a holder states of zeros, as after `step` steps, and return them."""
    owner = _owner(deepspeed, holder)
    made: dict[str, Any] = {kind: torch.zeros_like(holder.detach()) for kind in kinds}
    if isinstance(owner, torch.optim.Muon):
        # It counts no steps.
        owner.state[holder] = made
    elif isinstance(owner, torch.optim.Adam):
        # torch's fused kernels count on the device, in fp32.
        count = torch.tensor(float(step), dtype=torch.float32, device=holder.device)
        owner.state[holder] = {STEP: count, **made}
    else:
        owner.state[holder] = {STEP: step, **made}
    return owner.state[holder]


def publish(deepspeed: Any) -> None:
    """Bring weights that were written into holders to where the model computes. Collective."""
    stage = deepspeed.zero_optimization_stage()
    optimizer = deepspeed.optimizer
    if stage in (1, 2):
        optimizer.update_lp_params()
    elif stage == 3:
        optimizer.checkpoint_event_prologue()
        for number in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
        optimizer.checkpoint_event_epilogue()


def counters(deepspeed: Any) -> dict[str, Any]:
    """State of schedule and loss scale, the same on all ranks, as JSON can hold it."""
    scaler = _scaler(deepspeed)
    return {
        "schedule": deepspeed.lr_scheduler.state_dict(),
        "loss_scale": {f: getattr(scaler, f) for f in SCALER_FIELDS if hasattr(scaler, f)},
    }


def set_counters(deepspeed: Any, stored: Mapping[str, Any]) -> None:
    """Take what `counters` gave, perhaps at another stage."""
    schedule = deepspeed.lr_scheduler
    schedule.load_state_dict(dict(stored["schedule"]))
    for group, rate in zip(schedule.optimizer.param_groups, schedule.get_last_lr(), strict=True):
        group["lr"] = rate
    scaler = _scaler(deepspeed)
    for field, value in stored["loss_scale"].items():
        if hasattr(scaler, field):
            setattr(scaler, field, value)


def _scaler(deepspeed: Any) -> Any:
    """What adapts the loss scale to fp16, or None."""
    scaler = getattr(deepspeed.optimizer, "loss_scaler", None)
    return scaler if getattr(scaler, "dynamic", False) else None


def _place_of_zero_2(optimizer: Any, name: str, parameter: Any) -> Place | None:
    """Stages 1 and 2: a stretch of each group's parameters laid end to end."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    return Place(
        name=name,
        start=mapping.lp_fragment_address.start,
        length=mapping.lp_fragment_address.numel,
        holder=optimizer.single_partition_of_fp32_groups[mapping.param_group_index],
        offset=mapping.hp_fragment_address.start,
    )


def _place_of_zero_3(optimizer: Any, name: str, parameter: Any) -> Place | None:
    """Stage 3: the rank's share of each parameter; the last shares may be padded."""
    group, offset, share = optimizer.grad_position[optimizer.get_param_id(parameter)]
    start = share * optimizer._get_param_partition_rank(parameter)
    length = min(share, parameter.ds_numel - start)
    if length <= 0:
        return None
    holder = optimizer.fp32_partitioned_groups_flat[group]
    return Place(name=name, start=start, length=length, holder=holder, offset=offset)


def _owner(deepspeed: Any, holder: Tensor) -> torch.optim.Optimizer:
    """The optimizer that steps a holder: DeepSpeed's stages wrap one, and ours may have parts."""
    optimizer = deepspeed.optimizer
    if deepspeed.zero_optimization_stage() > 0:
        optimizer = optimizer.optimizer
    for part in _parts(optimizer):
        if any(p is holder for group in part.param_groups for p in group["params"]):
            return part
    return next(iter(_parts(optimizer)))


def _parts(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    yield from getattr(optimizer, "parts", (optimizer,))

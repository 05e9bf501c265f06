"""The ranks of one learner: torch.distributed for DeepSpeed, and small sums over all ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from quartet.errors import InfraError, QuartetError
from quartet_learner.parallel import RankLayout

RANK_FAILED = "RANK_FAILED"
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Longest wait for the other ranks inside one operation; also covers slow checkpoint writes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankGroup:
    """This process among the learner's ranks."""

    rank: int
    world_size: int
    device: Any
    """torch.device that this rank trains on."""
    control: Any
    """A gloo group over all ranks, for what is on the CPU whatever trains."""
    layout: RankLayout
    """Which ranks share samples, and how."""
    ring: Any = None
    """The torch.distributed group of this rank's ring, where sequences are spread."""

    @property
    def data_rank(self) -> int:
        """Which of `layout.data_size` shares of the samples this rank works on."""
        return self.layout.data_rank(self.rank)

    @property
    def leads(self) -> bool:
        """True for the one rank of those with the same samples that counts them."""
        return self.layout.leads(self.rank)

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Add numbers up over all ranks, name by name; all ranks pass the same names."""
        import torch
        import torch.distributed as dist

        names = sorted(values)
        total = torch.tensor([values[name] for name in names], dtype=torch.float64)
        if self.world_size > 1:
            dist.all_reduce(total, group=self.control)
        return dict(zip(names, total.tolist(), strict=True))

    def agree(self, what: str, error: Exception | None) -> None:
        """Wait for all ranks; raise on every rank if `error` happened on any.

        Raises:
            InfraError: `what` failed, here or on another rank.
            QuartetError: `error` itself, on the rank that has it, when it is one.
        """
        failures = self.sum({"failures": float(error is not None)})["failures"]
        if isinstance(error, QuartetError):
            raise error
        if error is not None:
            raise InfraError(f"{what} failed: {error}", reason=RANK_FAILED) from error
        if failures:
            raise InfraError(f"{what} failed on another rank", reason=RANK_FAILED)


def join_group(
    store: Any, rank: int, world_size: int, *, tensor_size: int = 1, ring_size: int = 1
) -> RankGroup:
    """Enter the group of all ranks.

    Args:
        store: torch.distributed store that all ranks share.
        rank: this process's.
        world_size: ranks.
        tensor_size: ranks over which a matrix is spread.
        ring_size: ranks over which a sequence is spread.

    Raises:
        ConfigError: the ranks cannot be cut into groups of these sizes.
    """
    layout = RankLayout(world_size=world_size, tensor_size=tensor_size, ring_size=ring_size)
    layout.check()
    prepare_environment(rank)
    import torch
    import torch._dynamo  # DeepSpeed's zero.Init breaks whoever imports it later
    import torch.distributed as dist

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    deepspeed = import_deepspeed()
    backend = "nccl" if on_gpu else "gloo"
    if not dist.is_initialized():
        dist.init_process_group(
            backend=backend,
            store=dist.PrefixStore("quartet/group", store),
            rank=rank,
            world_size=world_size,
            timeout=COLLECTIVE_TIMEOUT,
        )
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    control = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
    return RankGroup(
        rank=rank,
        world_size=world_size,
        device=device,
        control=control,
        layout=layout,
        ring=_ring_of(layout, rank, backend),
    )


def _ring_of(layout: RankLayout, rank: int, backend: str) -> Any:
    """The group of this rank's ring, or None. Every rank makes all groups, as torch wants it."""
    import torch.distributed as dist

    if layout.ring_size == 1:
        return None
    groups = {
        number: dist.new_group(ranks, backend=backend, timeout=COLLECTIVE_TIMEOUT)
        for number, ranks in enumerate(layout.rings())
    }
    return next(groups[n] for n, ranks in enumerate(layout.rings()) if rank in ranks)


def prepare_environment(rank: int) -> None:
    """Set what DeepSpeed insists on finding in the environment, where a launcher has not."""
    import torch

    os.environ.setdefault("LOCAL_RANK", str(rank))
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def import_deepspeed() -> Any:
    """Import DeepSpeed without its shared-memory operator.

    That operator serves tensor-parallel inference only, and building it takes 80 s of compiling.
    """
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed

"""Sequence parallelism: the ranks of a ring share one packed row, each holding a slice of it.

Every rank takes its own tokens through all layers. Only attention needs the others: the keys and
values of all slices are gathered, some heads at a time, and each rank's queries look at the part of
their sequence that comes before them (context parallelism of Llama 3, arXiv:2407.21783, section
3.3.2). The outputs of the head are gathered as well, so every rank of a ring computes the loss of
all tokens and has the gradient of what it computed itself; the sum over the ring is the whole one.

Slices are equal and contiguous. A row that cannot be cut evenly is filled up with one more sequence
that nothing looks at.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quartet.nn import ModelInputs


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """What one rank of a ring computes of a packed row."""

    inputs: ModelInputs
    """[1, width]; `places` stays that of the whole row."""
    bounds: tuple[int, ...]
    """[S + 1] where the sequences of the whole row begin, then its end; filling included."""
    start: int
    """Place of this rank's first token in the row."""
    rows: Tensor
    """[m] int64 places, in the slice, of the outputs that this rank computes."""
    owners: Tensor
    """[M] int64: the ring rank that computes each output."""

    @property
    def width(self) -> int:
        """Tokens of each rank."""
        return int(self.inputs.input_ids.shape[1])


class Ring:
    """The ring that this rank belongs to.

    Attributes:
        size: ranks of the ring.
        rank: this one's place in it.
        head_stride: key-value heads gathered at a time.
        group: their torch.distributed group.
    """

    def __init__(self, group: Any, *, rank: int, size: int, head_stride: int = 1) -> None:
        """Be the ring rank `rank` of `size` in `group`."""
        self.group = group
        self.rank = rank
        self.size = size
        self.head_stride = head_stride
        self._current: Slice | None = None
        self._prepared: Any = None

    @property
    def current(self) -> Slice:
        """The slice of the pass under way. Recomputed passes are of the row that was cut last."""
        if self._current is None:
            raise RuntimeError("no row has been cut for this ring")
        return self._current

    def cut(self, inputs: ModelInputs, rows: Tensor) -> Slice:
        """This rank's part of a packed row. All ranks of the ring are given the same.

        Args:
            inputs: packed.
            rows: [M] int64 places whose outputs are wanted.
        """
        total = inputs.input_ids.shape[1]
        width = -(-total // self.size)
        filling = width * self.size - total
        ids = torch.nn.functional.pad(inputs.input_ids, (0, filling))
        extra = torch.arange(filling, device=ids.device)[None]
        positions = torch.cat([inputs.position_ids, extra], dim=1)
        lengths = [*inputs.packed_lengths, filling] if filling else inputs.packed_lengths
        start = self.rank * width
        owners = rows // width
        self._prepared = None
        self._current = Slice(
            inputs=ModelInputs(
                input_ids=ids[:, start : start + width].contiguous(),
                attention_mask=None,
                position_ids=positions[:, start : start + width].contiguous(),
                places=inputs.places,
            ),
            bounds=tuple(itertools.accumulate(lengths, initial=0)),
            start=start,
            rows=rows[owners == self.rank] - start,
            owners=owners,
        )
        return self._current

    def once_a_pass(self, prepare: Callable[[], Any]) -> Any:
        """What `prepare` returned in the first layer after `cut`: it may wait for the device."""
        if self._prepared is None:
            self._prepared = prepare()
        return self._prepared

    def join(self, outputs: Tensor) -> Tensor:
        """[M] outputs of all ranks, from the [m] of this one, in the order of `rows` of `cut`.

        Every rank of the ring must compute the same from the result: of the gradient, each takes
        the part of its own outputs as it is.
        """
        owners = self.current.owners
        counts = torch.bincount(owners, minlength=self.size).tolist()
        padded = torch.nn.functional.pad(outputs, (0, max(counts) - len(outputs)))
        gathered = _GatherCopies.apply(padded, self.group, self.rank, self.size)
        parts = [gathered[rank, :count] for rank, count in enumerate(counts)]
        order = torch.argsort(owners, stable=True)
        return torch.cat(parts).new_zeros(len(owners)).index_put((order,), torch.cat(parts))

    def join_tokens(self, values: Tensor) -> Tensor:
        """[size * width, n] of the whole row, from the [width, n] of this rank; as `join`."""
        return _GatherCopies.apply(values, self.group, self.rank, self.size).flatten(0, 1)

    def gather(self, tensor: Tensor) -> Tensor:
        """As `join_tokens`, for attention, whose queries are each rank's own.

        What each rank computes from it may differ: gradients are added up over the ring.
        """
        return _GatherParts.apply(tensor, self.group, self.rank, self.size)


class _GatherCopies(torch.autograd.Function):
    """Stack the ranks' tensors; the gradient of all ranks is the same, so none is added up."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any, rank: int, size: int) -> Tensor:
        ctx.rank = rank
        return _gathered(tensor, group, size).unflatten(0, (size, len(tensor)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0][ctx.rank], None, None, None


class _GatherParts(torch.autograd.Function):
    """Join the ranks' tensors end to end; each rank's gradient is of its own use of the whole."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any, rank: int, size: int) -> Tensor:
        ctx.group, ctx.rank, ctx.width = group, rank, len(tensor)
        return _gathered(tensor, group, size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        whole = grads[0].contiguous()
        if dist.get_backend(ctx.group) == "gloo":
            # gloo's reduce-scatter is an all-reduce too, and not of every type.
            dist.all_reduce(whole, group=ctx.group)
            return whole.narrow(0, ctx.rank * ctx.width, ctx.width), None, None, None
        part = whole.new_empty(ctx.width, *whole.shape[1:])
        dist.reduce_scatter_tensor(part, whole, group=ctx.group)
        return part, None, None, None


def _gathered(tensor: Tensor, group: Any, size: int) -> Tensor:
    whole = tensor.new_empty(size * len(tensor), *tensor.shape[1:])
    dist.all_gather_into_tensor(whole, tensor.contiguous(), group=group)
    return whole

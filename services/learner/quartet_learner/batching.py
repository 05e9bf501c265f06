"""How one optimizer step is cut into micro-batches and spread over ranks.

A plan depends on lengths alone, so every rank computes the same one without talking. All ranks get
the same number of micro-batches, because every forward and backward pass is a collective; where
there is nothing left to do a rank gets an empty one. The result of the step does not depend on
the plan, only time and memory do.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from quartet.errors import RequestError

MicroBatch = tuple[int, ...]
"""Numbers of sequences. Empty: run a pass that adds nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What bounds a micro-batch. With neither, each unit is a micro-batch of its own."""

    max_tokens: int | None = None
    """Most tokens of one forward pass on one rank, padding included."""
    max_units: int | None = None
    """Most sequences, or pairs where sequences come in pairs."""
    padded: bool = True
    """A micro-batch of k sequences takes k times the longest of them, not their sum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Micro-batches by rank, the same number for each, long ones first."""

    ranks: tuple[tuple[MicroBatch, ...], ...]

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches over all ranks that are not empty."""
        return sum(bool(batch) for rank in self.ranks for batch in rank)


def plan_micro_batches(
    lengths: Sequence[int],
    limits: Limits,
    *,
    world_size: int,
    sequences_per_unit: int = 1,
    names: Sequence[str] = (),
) -> Plan:
    """Cut sequences into micro-batches and give each rank its share.

    Args:
        lengths: tokens of each sequence; with two sequences a unit, numbers 2i and 2i + 1 stay
            together.
        limits: bounds of a micro-batch.
        world_size: ranks.
        sequences_per_unit: 1, or 2 for pairs.
        names: of the sequences, for messages.

    Raises:
        RequestError: a sequence (pair) that does not fit a micro-batch by itself.
    """
    units = [
        tuple(range(first, first + sequences_per_unit))
        for first in range(0, len(lengths), sequences_per_unit)
    ]
    _check_each_fits(units, lengths, limits, names)
    # Neighbours in length share a micro-batch: little padding, and an order that does not depend
    # on the order in which samples were sent.
    units.sort(key=lambda unit: -max(lengths[i] for i in unit))
    batches = _fill(units, lengths, limits)
    batches = _split_to_multiple(batches, world_size, sequences_per_unit)
    return Plan(ranks=_deal(batches, lengths, limits, world_size))


def tokens_taken(batch: MicroBatch, lengths: Sequence[int], padded: bool) -> int:
    """Tokens of one forward pass, padding included."""
    if not batch:
        return 0
    taken = [lengths[i] for i in batch]
    return max(taken) * len(taken) if padded else sum(taken)


def _check_each_fits(
    units: Sequence[MicroBatch], lengths: Sequence[int], limits: Limits, names: Sequence[str]
) -> None:
    if limits.max_tokens is None:
        return
    for unit in units:
        taken = tokens_taken(unit, lengths, limits.padded)
        if taken > limits.max_tokens:
            what = "pair" if len(unit) > 1 else "sequence"
            raise RequestError(
                f"a {what} of {taken} tokens is longer than a micro-batch of {limits.max_tokens}",
                reason="SEQUENCE_EXCEEDS_MICRO_BATCH",
                field="max_tokens_per_micro_batch",
                value=str(limits.max_tokens),
                remedy=f"allow at least {taken} tokens in a micro-batch",
                sample_id=names[min(unit)] if names else str(min(unit)),
            )


def _fill(units: Sequence[MicroBatch], lengths: Sequence[int], limits: Limits) -> list[MicroBatch]:
    """Next fit for padded micro-batches (contiguous in length), first fit for packed ones."""
    if limits.max_tokens is None and limits.max_units is None:
        return list(units)
    batches: list[list[MicroBatch]] = []
    for unit in units:
        candidates = batches[-1:] if limits.padded else batches
        for batch in candidates:
            if _fits(batch, unit, lengths, limits):
                batch.append(unit)
                break
        else:
            batches.append([unit])
    return [tuple(i for unit in batch for i in unit) for batch in batches]


def _fits(
    batch: Sequence[MicroBatch], unit: MicroBatch, lengths: Sequence[int], limits: Limits
) -> bool:
    if limits.max_units is not None and len(batch) >= limits.max_units:
        return False
    if limits.max_tokens is None:
        return True
    together = tuple(i for u in [*batch, unit] for i in u)
    return tokens_taken(together, lengths, limits.padded) <= limits.max_tokens


def _split_to_multiple(
    batches: list[MicroBatch], world_size: int, sequences_per_unit: int
) -> list[MicroBatch]:
    """Halve the largest micro-batches until all ranks have the same number of them.

    What cannot be split is left to empty micro-batches.
    """
    heap = [(-len(batch), number, batch) for number, batch in enumerate(batches)]
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) % world_size:
        _, _, largest = heap[0]
        half = len(largest) // sequences_per_unit // 2 * sequences_per_unit
        if half == 0:
            break
        heapq.heapreplace(heap, (half - len(largest), number, largest[half:]))
        heapq.heappush(heap, (-half, number + 1, largest[:half]))
        number += 2
    return [batch for _, _, batch in heap]


def _deal(
    batches: list[MicroBatch], lengths: Sequence[int], limits: Limits, world_size: int
) -> tuple[tuple[MicroBatch, ...], ...]:
    """Longest first, each to the rank with the least work that still has room."""

    def cost(batch: MicroBatch) -> tuple[int, MicroBatch]:
        return -tokens_taken(batch, lengths, limits.padded), batch

    rounds = -(-len(batches) // world_size)
    ranks: list[list[MicroBatch]] = [[] for _ in range(world_size)]
    load = [0] * world_size
    for batch in sorted(batches, key=cost):
        open_ranks = [rank for rank in range(world_size) if len(ranks[rank]) < rounds]
        rank = min(open_ranks, key=lambda r: (load[r], r))
        ranks[rank].append(batch)
        load[rank] += tokens_taken(batch, lengths, limits.padded)
    return tuple(tuple(rank + [()] * (rounds - len(rank))) for rank in ranks)

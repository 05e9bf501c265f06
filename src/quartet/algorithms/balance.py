"""Cut a batch into parts of about the same number of tokens."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def karmarkar_karp(
    lengths: Sequence[int], parts: int, *, equal_size: bool = False
) -> list[list[int]]:
    """Partition by the largest differencing method of Karmarkar and Karp (1982).

    Start with one partial solution an item (or, for equal sizes, one per `parts` items of similar
    length). Again and again, take the two solutions with the largest spread and join them, the
    heaviest part of one with the lightest of the other, so that differences cancel.

    Args:
        lengths: Weight of each item.
        parts: Number of parts, at least 1.
        equal_size: All parts get the same number of items, which `parts` must divide.

    Returns:
        `parts` sorted lists of indices into `lengths`, every index once, the heaviest part first.
        Parts are empty only when there are fewer items than parts.

    Raises:
        ValueError: parts is below 1, or does not divide the items when it must.
    """
    if parts < 1:
        raise ValueError(f"parts is {parts}; it must be at least 1")
    if equal_size and len(lengths) % parts:
        raise ValueError(f"{len(lengths)} items cannot be cut into {parts} parts of equal size")
    if not lengths:
        return [[] for _ in range(parts)]
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    step = parts if equal_size else 1
    heap: list[_Solution] = []
    for start in range(0, len(order), step):
        items = [(lengths[i], [i]) for i in order[start : start + step]]
        heap.append(_Solution(items + [(0, [])] * (parts - len(items))))
    heapq.heapify(heap)
    while len(heap) > 1:
        first = heapq.heappop(heap)
        heapq.heappush(heap, first.join(heapq.heappop(heap)))
    return [sorted(items) for _, items in heap[0].sets]


class _Solution:
    """A partial partition: (weight, items) of each part, the heaviest first."""

    __slots__ = ("sets",)

    def __init__(self, sets: list[tuple[int, list[int]]]) -> None:
        self.sets = sorted(sets, key=lambda s: (s[0], len(s[1]), s[1]), reverse=True)

    @property
    def spread(self) -> int:
        """Heaviest part minus lightest."""
        return self.sets[0][0] - self.sets[-1][0]

    def join(self, other: _Solution) -> _Solution:
        """Heaviest with lightest, second heaviest with second lightest, and so on."""
        pairs = zip(self.sets, reversed(other.sets), strict=True)
        return _Solution([(a[0] + b[0], a[1] + b[1]) for a, b in pairs])

    def __lt__(self, other: _Solution) -> bool:
        """Order of the heap: the largest spread first; ties by content, to be deterministic."""
        if self.spread != other.spread:
            return self.spread > other.spread
        return self.sets > other.sets

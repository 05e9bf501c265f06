"""How a learner's ranks share the work.

Ranks are cut three ways, tensor ranks being neighbours, then ring ranks, then data ranks:

    rank = (data * ring_size + ring) * tensor_size + tensor

Tensor ranks hold parts of each layer's matrices and see the same samples. Ring ranks hold the same
weights and see parts of the same sequences. Data ranks see different samples. DeepSpeed knows of
tensor ranks; to it ring ranks are data ranks whose gradients it averages.
"""

from __future__ import annotations

from dataclasses import dataclass

from quartet.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLayout:
    """What each of a learner's ranks works on."""

    world_size: int
    """All ranks; a multiple of `tensor_size * ring_size`."""
    tensor_size: int = 1
    """Ranks over which a matrix is spread."""
    ring_size: int = 1
    """Ranks over which a sequence is spread."""

    def check(self) -> None:
        """Raise ConfigError where the ranks cannot be cut into groups of these sizes."""
        if self.world_size % self.model_size:
            raise ConfigError(
                f"{self.world_size} ranks cannot be cut into groups of {self.model_size}",
                field="learner.num_ranks",
                value=str(self.world_size),
                remedy="use a multiple of ds.tensor_parallel_size x ds.ring_attn_size = "
                f"{self.tensor_size} x {self.ring_size}",
            )

    @property
    def model_size(self) -> int:
        """Ranks that together work on the same samples."""
        return self.tensor_size * self.ring_size

    @property
    def data_size(self) -> int:
        """Groups of ranks that work on different samples."""
        return self.world_size // self.model_size

    @property
    def gradient_size(self) -> int:
        """Ranks over which DeepSpeed averages the gradient of a weight."""
        return self.world_size // self.tensor_size

    def data_rank(self, rank: int) -> int:
        """Which samples `rank` works on."""
        return rank // self.model_size

    def ring_rank(self, rank: int) -> int:
        """Which part of a sequence `rank` works on."""
        return rank // self.tensor_size % self.ring_size

    def leads(self, rank: int) -> bool:
        """True for the one rank of those with the same samples that counts them."""
        return rank % self.model_size == 0

    def rings(self) -> list[list[int]]:
        """The ranks of every ring, in the order of their parts."""
        return [
            [
                (data * self.ring_size + ring) * self.tensor_size + t
                for ring in range(self.ring_size)
            ]
            for data in range(self.data_size)
            for t in range(self.tensor_size)
        ]

"""A moving average of the trained weights, kept in fp32 in the main memory of rank 0.

After each optimizer step that changed the weights: average = beta * average + (1 - beta) * weights.
It is kept by the names of parameters, whole, whatever the ranks and the ZeRO stage: so a checkpoint
of it fits them all. Under ZeRO-3 an update gathers the weights once, bucket by bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quartet_learner.gather import trained_parameters, visit_whole
from quartet_learner.group import RankGroup

FILE = "ema.safetensors"


class MovingAverage:
    """The average of a model's trained parameters. Methods but `save` are collective.

    Attributes:
        values: whole fp32 tensors by name on rank 0, empty elsewhere.
    """

    def __init__(self, model: nn.Module, group: RankGroup, beta: float) -> None:
        """Begin at the present weights of `model`.

        Args:
            model: a transformers model.
            group: all ranks.
            beta: weight of the past, in [0, 1).
        """
        self.values: dict[str, Tensor] = {}
        self._model = model
        self._group = group
        self._beta = beta
        self._visit(self._begin)

    def update(self) -> None:
        """Take in the weights after an optimizer step."""
        self._visit(self._mix)

    def save(self, folder: Path) -> None:
        """Write the average into a checkpoint; rank 0 does."""
        if self._group.rank == 0:
            save_file(self.values, folder / FILE)

    def load(self, folder: Path) -> None:
        """Take the average of a checkpoint."""
        if self._group.rank == 0:
            self.values = load_file(folder / FILE)

    def _visit(self, visit: Callable[[str, Tensor], None]) -> None:
        named = trained_parameters(self._model)
        names = {id(parameter): name for name, parameter in named.items()}
        visit_whole(named.values(), self._group, lambda p, whole: visit(names[id(p)], whole))

    def _begin(self, name: str, whole: Tensor) -> None:
        self.values[name] = whole.float().to("cpu", copy=True)

    def _mix(self, name: str, whole: Tensor) -> None:
        self.values[name].lerp_(whole.float().cpu(), 1.0 - self._beta)

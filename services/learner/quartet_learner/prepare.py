"""What is done to a model between its loading and DeepSpeed: kernels, and its place among ranks."""

from __future__ import annotations

from quartet_learner import attention, deepcompile, kernels, ring_attention, tensor_parallel
from quartet_learner.group import RankGroup
from quartet_learner.model import TrainedModel, load_model
from quartet_learner.ring import Ring
from quartet_learner.settings import LearnerSettings


def load_prepared(settings: LearnerSettings, group: RankGroup) -> tuple[TrainedModel, bool]:
    """`load_model`, then what the settings ask for beside the plain model.

    Returns:
        As `load_model`.

    Raises:
        ConfigError: the model cannot have it.
    """
    if settings.deepcompile:
        deepcompile.check_device()
    model, head_is_new = load_model(settings)
    if settings.packed:
        attention.check_packing(model.hf)
    if settings.use_liger_kernel:
        kernels.apply_liger(model.hf)
    if settings.tensor_parallel_size > 1:
        tensor_parallel.check_model(model.hf, settings.tensor_parallel_size)
    if group.ring is not None:
        model.ring = Ring(
            group.ring,
            rank=group.layout.ring_rank(group.rank),
            size=settings.ring_size,
            head_stride=settings.ring_head_stride,
        )
        ring_attention.install(model.hf, model.ring)
    return model, head_is_new

"""New weights in a worker of vLLM. What is needed beside vLLM's own reload."""
# pyright: reportMissingImports=false
# vLLM lives in an environment of its own, beside another transformers than the rest pins.

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def reload(worker: Any, tensors: Iterable[tuple[str, torch.Tensor]] | None) -> None:
    """Put tensors in place of all weights of a worker. Generation must be paused.

    A plain `model.load_weights` is not enough: weights that were packed for the device's
    kernels have lost the shape they came in, and it would stop in the middle.

    Args:
        worker: vLLM's.
        tensors: All of them; None takes the model that the worker was started with.
    """
    import torch

    model = worker.model_runner.get_model()
    _forget_half_loads(model)
    if tensors is None:
        worker.reload_weights()
    else:
        worker.reload_weights(weights_iterator=tensors)
    _refresh_tied_heads(model)
    if worker.device.type == "cuda":
        torch.cuda.synchronize(worker.device)  # the tensors are let go of after this


def _forget_half_loads(model: torch.nn.Module) -> None:
    """Drop what a reload that broke off has kept of layers it had begun.

    A fused layer counts the numbers that have arrived, and takes what it has when they are enough.
    With some of an earlier reload among them, it would be done before its last part comes, and
    pass over that part without an error.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        info: Any = get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights = []
            info.load_numel = 0


def _refresh_tied_heads(model: torch.nn.Module) -> None:
    """Pack heads anew that share the embeddings' weights.

    On CPUs a head computes with a packed copy of its own. A tied head gets no tensor in a push, so
    vLLM does not pack it again, and it would go on with the old embeddings.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    heads: list[Any] = [m for m in model.modules() if isinstance(m, ParallelLMHead)]
    for head in heads:
        if hasattr(head, "cpu_linear") and head.weight.numel():
            dispatch_cpu_unquantized_gemm(head, remove_weight=False)

"""What runs inside vLLM's worker processes. vLLM imports it there by name."""
# pyright: reportMissingImports=false
# vLLM lives in an environment of its own, beside another transformers than the rest pins.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from quartet_rollout.engines.vllm.handover import Entry, mapped
from quartet_rollout.engines.vllm.receiver import WorkerReceiver

if TYPE_CHECKING:
    import torch


class WeightSwap:
    """Mixed into vLLM's Worker; `self` is the worker. Each public method is a collective_rpc."""

    def quartet_load(self, path: str, entries: Sequence[Entry]) -> int:
        """Put the tensors of a file in place of all weights. Generation must be paused.

        A plain `model.load_weights` is not enough: weights that were packed for the device's
        kernels have lost the shape they came in, and it would stop in the middle.

        Args:
            path: Of a `handover.SharedMemory`.
            entries: Where each tensor lies in it.

        Returns:
            How many tensors were taken.
        """
        _reload(self, mapped(path, entries))
        return len(entries)

    def quartet_connect(self, path: str) -> int:
        """Be a member of pushes from here on, on orders from the socket at `path`.

        Returns:
            Rank of this worker in its engine.
        """
        worker: Any = self
        worker.quartet_receiver = WorkerReceiver(path, rank=worker.rank, device=str(worker.device))
        return worker.rank

    def quartet_load_received(self, epoch: int) -> None:
        """Put what this worker has received in place of all weights, as `quartet_load` does."""
        worker: Any = self
        _reload(self, worker.quartet_receiver.tensors(epoch))


def _reload(worker: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    import torch

    worker.reload_weights(weights_iterator=tensors)
    _refresh_tied_heads(worker.model_runner.get_model())
    if worker.device.type == "cuda":
        torch.cuda.synchronize(worker.device)  # the tensors are let go of after this


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

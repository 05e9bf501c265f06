"""What runs inside vLLM's worker processes. vLLM imports it there by name."""
# pyright: reportMissingImports=false
# vLLM lives in an environment of its own, beside another transformers than the rest pins.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quartet_rollout.engines.vllm.handover import Entry, mapped
from quartet_rollout.engines.vllm.receiver import WorkerReceiver
from quartet_rollout.engines.vllm.reload import reload


class WeightSwap:
    """Mixed into vLLM's Worker; `self` is the worker. Each public method is a collective_rpc."""

    def quartet_load(self, path: str, entries: Sequence[Entry]) -> int:
        """Put the tensors of a file in place of all weights. Generation must be paused.

        Args:
            path: Of a `handover.SharedMemory`.
            entries: Where each tensor lies in it.

        Returns:
            How many tensors were taken.
        """
        reload(self, mapped(path, entries))
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
        reload(self, worker.quartet_receiver.tensors(epoch))
        worker.quartet_receiver.loaded()

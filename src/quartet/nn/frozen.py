"""A model that is only read, and the one thread that touches it.

Shared by the services that hold such a model. torch is imported inside the methods.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from quartet.errors import StateError
from quartet.obs import queues

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class FrozenModel:
    """Runs work on a model, one piece after another in the order in which it was asked for."""

    def __init__(
        self,
        load: Callable[[torch.device], Any],
        *,
        offload: bool = False,
        thread_name: str = "model",
    ) -> None:
        """Say how to load; `start` loads.

        Args:
            load: returns the model; gets the device where it will work.
            offload: keep the weights in main memory and bring them to the device for each piece of
                work. On a machine without a GPU they are there anyway.
            thread_name: of the one thread, and of its queue in quartet_queue_depth.
        """
        self._name = thread_name
        self._load = load
        self._offload = offload
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=thread_name)
        self._model: Any = None
        self._is_asleep = False
        self.digest = ""
        """Digest of the weights as loaded."""

    @property
    def is_asleep(self) -> bool:
        """True between `sleep` and `wake`."""
        return self._is_asleep

    async def start(self) -> None:
        """Load the model and take its digest."""
        await self._in_thread(self._load_model)

    async def run(self, work: Callable[[Any], T]) -> T:
        """Return work(model), called in inference mode in the model's thread.

        Raises:
            StateError: the model is asleep.
        """
        return await self._in_thread(lambda: self._work(work))

    async def sleep(self) -> None:
        """Move the weights to main memory. Work asked for earlier is done first."""
        await self._in_thread(lambda: self._set_asleep(True))

    async def wake(self) -> None:
        """Move them back."""
        await self._in_thread(lambda: self._set_asleep(False))

    async def stop(self) -> None:
        """Finish the work under way and drop what waits."""
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await queues.submit(self._thread, function, queue=self._name)

    def _load_model(self) -> None:
        from transformers.utils import logging as transformers_logging

        from quartet.nn.digest import model_digest
        from quartet.nn.loading import pick_device

        transformers_logging.disable_progress_bar()  # a service's log is no terminal
        self._device = pick_device()
        model = self._load(self._device).eval().requires_grad_(False)
        self._model = model if self._offload else model.to(self._device)
        self.digest = model_digest(self._model)

    def _work(self, work: Callable[[Any], T]) -> T:
        import torch

        if self._is_asleep:
            raise StateError(
                "the model is asleep", reason="ASLEEP", remedy="call Wake before the next request"
            )
        if not self._offload:
            with torch.inference_mode():
                return work(self._model)
        try:
            with torch.inference_mode():
                return work(self._model.to(self._device))
        finally:
            self._to_main_memory()

    def _set_asleep(self, is_asleep: bool) -> None:
        self._is_asleep = is_asleep
        if is_asleep:
            self._to_main_memory()
        elif not self._offload:
            self._model.to(self._device)

    def _to_main_memory(self) -> None:
        import torch

        self._model.to("cpu")
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

"""How new weights reach the server: its door for them, if it has one.

vLLM's server has one in its development mode; any other can be given a small hook. What has neither
serves one policy for ever.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from quartet.errors import InfraError, RequestError
from quartet_rollout.engines.openai.folder import written
from quartet_rollout.engines.openai.http import Server

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

LOAD_SECONDS = 600.0
"""Longest time that the server may take to read a model."""
_FIRST_VERSION = "default"
"""What vLLM calls the weights that it started with."""

NamedTensors = Iterable[tuple[str, "torch.Tensor"]]


class WeightDoor(Protocol):
    """How one server takes weights."""

    @property
    def takes_weights(self) -> bool:
        """False where the server serves one policy for ever."""
        ...

    async def begin(self) -> None:
        """Have the server serve its model as it is on the disk: version 0."""
        ...

    async def hold(self) -> None:
        """Have the server stop between two tokens, if it can."""
        ...

    async def go_on(self) -> None:
        """Go on."""
        ...

    async def load(self, tensors: NamedTensors, policy_version: int) -> None:
        """Put tensors in place of all weights, while held, and drop every cache of the old ones."""
        ...

    async def has_changed(self, *, was_away: bool) -> bool:
        """True when the server no longer holds what was loaded last.

        Args:
            was_away: Nobody listened at its address for a while.
        """
        ...


class NoDoor:
    """A server whose weights never change."""

    takes_weights = False

    async def begin(self) -> None:
        """Nothing to do."""

    async def hold(self) -> None:
        """It works on."""

    async def go_on(self) -> None:
        """It never stopped."""

    async def load(self, tensors: NamedTensors, policy_version: int) -> None:
        """Never reached: a push is refused when it is prepared."""
        raise RequestError("the server takes no weights", reason="WEIGHTS_BACKEND_UNSUPPORTED")

    async def has_changed(self, *, was_away: bool) -> bool:
        """It cannot: started again, it has the same weights."""
        return False


class HookDoor(NoDoor):
    """A URL that is told where a model lies, and answers when the server serves it."""

    takes_weights = True

    def __init__(self, server: Server, url: str, *, model_folder: Path, parent: str | None) -> None:
        self._server = server
        self._url = url
        self._model_folder = model_folder
        self._parent = parent

    async def begin(self) -> None:
        """Whatever the server was told by an earlier engine, it gets its own model back."""
        await self._tell(self._model_folder, 0)

    async def load(self, tensors: NamedTensors, policy_version: int) -> None:
        """Write a model folder, which may go when the hook has answered."""
        async with _Written(tensors, self._model_folder, self._parent) as folder:
            await self._tell(folder, policy_version)

    async def has_changed(self, *, was_away: bool) -> bool:
        """A server that was started again has forgotten what it was told."""
        return was_away

    async def _tell(self, folder: Path, policy_version: int) -> None:
        body = {"path": str(folder), "policy_version": policy_version}
        await self._server.post(self._url, body, seconds=LOAD_SECONDS)


class VllmDoor:
    """vLLM's own server, in its development mode."""

    takes_weights = True

    def __init__(
        self, server: Server, *, has_extension: bool, model_folder: Path, parent: str | None
    ) -> None:
        """Make a door.

        Args:
            server: vLLM's.
            has_extension: Its workers have `FolderSwap`.
            model_folder: What it was started with.
            parent: Folder for new weights that both sides see.
        """
        self._server = server
        self._has_extension = has_extension
        self._model_folder = model_folder
        self._parent = parent
        # Nobody else's: a server that was started again, or that another engine pushes to,
        # has another name for its weights.
        self._owner = uuid.uuid4().hex[:12]
        self._name = ""
        self._is_loading = False

    async def begin(self) -> None:
        """A server that an earlier engine pushed to gets its own model back."""
        now = (await self._server.get("/weight_info"))["weight_version"]
        await self.hold()
        if now != _FIRST_VERSION:
            log.info("the server holds weights of an earlier push: it loads its model again")
            await self._load_folder("" if self._has_extension else str(self._model_folder))
        await self._set_name(0)
        await self.go_on()

    async def hold(self) -> None:
        """Requests stay as they are."""
        await self._server.post("/pause", query={"mode": "keep", "clear_cache": "false"})

    async def go_on(self) -> None:
        """Step again."""
        await self._server.post("/resume")

    async def load(self, tensors: NamedTensors, policy_version: int) -> None:
        """All workers read one folder."""
        self._is_loading = True
        try:
            held = list(tensors)
            async with _Written(held, self._model_folder, self._parent) as folder:
                await self._load_folder(str(folder), len(held))
            await self._set_name(policy_version)
        finally:
            self._is_loading = False

    async def has_changed(self, *, was_away: bool) -> bool:
        """It has weights of another name: started again, or pushed to by somebody else."""
        before, was_loading = self._name, self._is_loading
        now = (await self._server.get("/weight_info"))["weight_version"]
        return not (was_loading or self._is_loading) and now not in (before, self._name)

    async def _load_folder(self, folder: str, num_tensors: int | None = None) -> None:
        method, key = ("reload_weights", "weights_path")
        if self._has_extension:
            method, key = ("quartet_load_folder", "folder")
        arguments = {key: folder} if folder else {}
        call: dict[str, Any] = {"method": method, "kwargs": arguments}
        answer = await self._server.post("/collective_rpc", call, seconds=LOAD_SECONDS)
        if self._has_extension and folder and num_tensors is not None:
            _check_taken(answer["results"], num_tensors)
        # Also of what runs for others: it goes on with keys and values of the new weights.
        answer = await self._server.post(
            "/reset_prefix_cache", query={"reset_running_requests": "true"}
        )
        if not answer["success"]:
            raise InfraError("the server did not drop its caches", reason="CACHE_NOT_DROPPED")

    async def _set_name(self, policy_version: int) -> None:
        name = f"{self._owner}-{policy_version}"
        await self._server.post("/update_weight_version", {"new_version": name})
        self._name = name


def _check_taken(results: Sequence[Mapping[str, int]], wanted: int) -> None:
    """Each worker has taken all tensors: vLLM keeps the old ones of what a folder lacks."""
    for rank, result in enumerate(results):
        if result["tensors"] != wanted:
            raise InfraError(
                f"worker {rank} found {result['tensors']} of {wanted} tensors in the folder",
                reason="WEIGHTS_INCOMPLETE",
            )


class _Written:
    """`folder.written` on a thread: gigabytes take a while."""

    def __init__(self, tensors: NamedTensors, like: Path, parent: str | None) -> None:
        self._folder = written(tensors, like=like, parent=parent)

    async def __aenter__(self) -> Path:
        return await asyncio.to_thread(self._folder.__enter__)

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._folder.__exit__, None, None, None)

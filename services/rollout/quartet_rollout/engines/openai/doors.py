"""Which door for weights a server has: as `rollout.server_weights` says, or found out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from quartet.config.rpc import is_local
from quartet.errors import ConfigError, QuartetError
from quartet_rollout.engines.openai.http import Server
from quartet_rollout.engines.openai.weights import HookDoor, NoDoor, VllmDoor, WeightDoor
from quartet_rollout.engines.vllm.facts import ModelFacts

if TYPE_CHECKING:
    from quartet.config import RolloutServeConfig

EXTENSION = "quartet_rollout.engines.openai.worker.FolderSwap"
_START = (
    "start vLLM's server with VLLM_SERVER_DEV_MODE=1 in its environment and "
    f"--worker-extension-cls {EXTENSION}"
)


async def find_door(
    server: Server, config: RolloutServeConfig, facts: ModelFacts, model_folder: Path
) -> WeightDoor:
    """The way in which this server takes weights.

    Args:
        server: To look at.
        config: Of the service.
        facts: Of the model.
        model_folder: Where the model lies.

    Raises:
        ConfigError: The server has not what the flags say, or cannot see the folder for weights.
    """
    wanted, parent = config.rollout.server_weights, config.rollout.server_folder
    if wanted == "none":
        return NoDoor()
    if "://" in wanted:
        _check_folder(wanted, parent)
        return HookDoor(server, wanted, model_folder=model_folder, parent=parent)
    if not await _has(server, "/is_paused"):
        if wanted == "auto":
            return NoDoor()
        raise _wrong(wanted, f"the server at {server.url} is not in its development mode", _START)
    _check_folder(server.url, parent)
    has_extension = await _has_extension(server)
    if not has_extension and facts.manifest.aliases and await _is_on_cpu(server):
        # vLLM packs a tied head for its kernels, and keeps the old one without an error.
        raise _wrong(
            wanted,
            f"the server at {server.url} has a model with tied embeddings on a CPU, and would go "
            "on with the head of the old weights",
            _START,
        )
    return VllmDoor(server, has_extension=has_extension, model_folder=model_folder, parent=parent)


async def _has(server: Server, path: str) -> bool:
    try:
        await server.get(path)
    except QuartetError as error:
        if error.info.reason == "SERVER_HAS_NOT":
            return False
        raise
    return True


async def _has_extension(server: Server) -> bool:
    """Its workers answer to this package. One that does not know the call says so, and lives on."""
    try:
        await server.post("/collective_rpc", {"method": "quartet_extension"})
    except QuartetError as error:
        if error.info.reason in ("SERVER_DOWN", "SERVER_LATE"):
            raise
        return False
    return True


async def _is_on_cpu(server: Server) -> bool:
    info = await server.get("/server_info?config_format=json")
    return "cpu" in str(info["vllm_config"]["device_config"])


def _check_folder(url: str, parent: str | None) -> None:
    host = urlsplit(url).hostname or ""
    if parent is None and not is_local(host):
        raise ConfigError(
            f"the server at {host} is another machine, and there is no folder for weights that "
            "both see",
            field="rollout.server_folder",
            remedy="name one on a shared disk, --rollout.server_folder; or, for a server whose "
            "weights never change, give --rollout.server_weights none",
        )


def _wrong(value: str, why: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"rollout.server_weights {value}: {why}",
        field="rollout.server_weights",
        value=value,
        remedy=remedy,
    )

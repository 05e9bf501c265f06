"""Whether the server is there, and still the one that was set up."""

from __future__ import annotations

import asyncio
import logging
import time

from quartet.errors import ConfigError, InfraError, QuartetError
from quartet_rollout.engines.openai.http import Server
from quartet_rollout.engines.openai.weights import WeightDoor

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
GONE_SECONDS = 600.0
"""How long a server may be away, at the start or later: time to load a large model."""
_HEALTH_SECONDS = 10.0


async def wait_for(server: Server, *, patience: float = GONE_SECONDS) -> None:
    """Wait until the server answers.

    Raises:
        ConfigError: It does not.
    """
    end = time.monotonic() + patience
    told = False
    # HTTP has no event for a server that comes up.
    while not await _is_there(server):
        if not told:
            log.info("waiting for the server at %s", server.url)
            told = True
        if time.monotonic() > end:
            raise ConfigError(
                f"nobody answers at {server.url} (waited {patience:g} s)",
                reason="SERVER_DOWN",
                field="rollout.server_url",
                value=server.url,
                remedy="start the server, or correct --rollout.server_url",
            )
        await asyncio.sleep(POLL_SECONDS)


async def gone(server: Server, door: WeightDoor, *, patience: float = GONE_SECONDS) -> InfraError:
    """Wait until this engine can never complete anything again, and say why.

    A server that comes back is waited for. One that comes back with other weights than this engine
    gave it ends the engine, because the versions that it names would be wrong.
    """
    away_since: float | None = None
    while True:
        await asyncio.sleep(POLL_SECONDS)
        if await _is_there(server):
            if await _has_changed(door, was_away=away_since is not None):
                return InfraError(
                    f"the server at {server.url} no longer has the weights that it was given: it "
                    "was started again, or somebody else pushes to it",
                    reason="SERVER_REPLACED",
                    remedy="give each rollout service a server of its own",
                )
            if away_since is not None:
                log.info("the server at %s is back", server.url)
            away_since = None
        elif away_since is None:
            away_since = time.monotonic()
            log.warning("the server at %s is away", server.url)
        elif time.monotonic() - away_since > patience:
            return InfraError(
                f"the server at {server.url} has been away for {patience:g} s",
                reason="ENGINE_DEAD",
                remedy="see the server's log",
            )


async def _is_there(server: Server) -> bool:
    try:
        await server.get("/health", seconds=_HEALTH_SECONDS)
    except QuartetError as error:
        # Not every server has this path; one that is busy answers late.
        return error.info.reason not in ("SERVER_DOWN", "ENGINE_FAILED")
    return True


async def _has_changed(door: WeightDoor, *, was_away: bool) -> bool:
    try:
        return await door.has_changed(was_away=was_away)
    except QuartetError:  # it went away just now: seen at the next look
        return False

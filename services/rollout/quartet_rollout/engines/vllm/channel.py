"""What the service's process and vLLM's workers say to each other about a push.

Over a unix socket in a folder of this user alone, open as long as the engine lives: vLLM's own
calls wait for the step under way, and a worker that dies is seen here at once.
"""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import dataclass

from quartet.errors import QuartetError
from quartet.types import PrepareWeightsRequest

_LENGTH_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """From a worker, once."""

    rank: int
    """Among the workers of its engine: tensor parallel ranks are neighbours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AskRoom:
    """To a worker: how much memory is free on your device?"""

    epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """From a worker."""

    epoch: int
    free_bytes: int
    index: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Join:
    """To a worker: make room, and join the group. Replaces any push before."""

    request: PrepareWeightsRequest
    """With the rank of this worker."""
    shared_path: str
    """Memory to stage in, shared by all workers; empty stages on the worker's device."""

    @property
    def epoch(self) -> int:
        """Of the push."""
        return self.request.epoch


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """From a worker."""

    epoch: int
    index: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Receive:
    """To a worker: take part in the broadcast of all buckets."""

    epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrived:
    """From a worker: a bucket is there."""

    epoch: int
    index: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Digested:
    """From a worker: the digest of a bucket, or why it cannot use it."""

    epoch: int
    index: int
    digest: str = ""
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Broken:
    """From a worker: it did not join, or the group broke. Nothing more of this push will come."""

    epoch: int
    error: QuartetError


@dataclass(frozen=True, kw_only=True, slots=True)
class Drop:
    """To a worker: forget a push."""

    epoch: int
    abort: bool


Order = AskRoom | Join | Receive | Drop
Report = Room | Joined | Arrived | Digested | Broken


def write(writer: asyncio.StreamWriter, message: Hello | Order | Report) -> None:
    """Queue one message."""
    data = pickle.dumps(message)
    writer.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)


async def read(reader: asyncio.StreamReader) -> object | None:
    """The next message; None when the other side is gone."""
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
        # Both ends are this program, and nobody else can open the socket.
        return pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None

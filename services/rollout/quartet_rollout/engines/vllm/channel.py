"""What the service's process and vLLM's workers say to each other about a push.

Over a unix socket in a folder of this user alone, open as long as the engine lives: vLLM's own
calls wait for the step under way, and a worker that dies is seen here at once. A message is JSON
behind its length; what the contract has a message for is that message inside it.
"""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from quartet import errors
from quartet.api.rollout.v1 import rollout_service_pb2 as pb
from quartet.codec import decode_prepare_weights_request, encode_prepare_weights_request
from quartet.errors import ErrorInfo, QuartetError
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


_KINDS = {
    kind.__name__: kind
    for kind in (Hello, AskRoom, Room, Join, Joined, Receive, Arrived, Digested, Broken, Drop)
}


def write(writer: asyncio.StreamWriter, message: Hello | Order | Report) -> None:
    """Queue one message."""
    data = json.dumps(_packed(message)).encode()
    writer.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)


async def read(reader: asyncio.StreamReader) -> object | None:
    """The next message; None when the other side is gone."""
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
        return _unpacked(json.loads(await reader.readexactly(length)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _packed(message: Hello | Order | Report) -> dict[str, Any]:
    values: dict[str, Any] = {f.name: getattr(message, f.name) for f in fields(message)}
    if isinstance(message, Join):
        encoded = encode_prepare_weights_request(message.request).SerializeToString()
        values["request"] = base64.b64encode(encoded).decode()
    elif isinstance(message, Broken):
        error = message.error
        values["error"] = [type(error).__name__, error.message, asdict(error.info)]
    return {"kind": type(message).__name__, **values}


def _unpacked(values: dict[str, Any]) -> object:
    kind = _KINDS[values.pop("kind")]
    if kind is Join:
        message = pb.PrepareWeightsRequest.FromString(base64.b64decode(values["request"]))
        values["request"] = decode_prepare_weights_request(message)
    elif kind is Broken:
        name, text, info = values["error"]
        values["error"] = getattr(errors, name)(text, info=ErrorInfo(**info))
    return kind(**values)

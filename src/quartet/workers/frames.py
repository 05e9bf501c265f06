"""What goes over the socket between a worker and who started it: a length, then JSON.

The length is four bytes, big-endian. No pickle: what user code sends is data, never code.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any

MAX_FRAME_BYTES = 64 << 20
"""Largest frame that is read. What a worker has to say is far smaller; this is a runaway."""

_LENGTH = struct.Struct(">I")


def pack_frame(frame: dict[str, Any]) -> bytes:
    """The bytes of a frame.

    Raises:
        TypeError: it holds what JSON has no form for.
    """
    data = json.dumps(frame).encode()
    return _LENGTH.pack(len(data)) + data


async def receive_frame(reader: asyncio.StreamReader) -> dict[str, Any]:
    """The next frame of a stream.

    Raises:
        asyncio.IncompleteReadError: the other side has hung up.
        ValueError: what came is too long, or no JSON object.
        RecursionError: it is nested too deep.
    """
    size = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))[0]
    if size > MAX_FRAME_BYTES:
        raise ValueError(f"an answer of {size} bytes")
    frame = json.loads(await reader.readexactly(size))
    if not isinstance(frame, dict):
        raise ValueError(f"an answer that is a {type(frame).__name__}")
    return frame


def write_frame(channel: socket.socket, frame: dict[str, Any]) -> None:
    """Send one frame, and wait until it is on its way."""
    channel.sendall(pack_frame(frame))


def read_frame(channel: socket.socket) -> dict[str, Any] | None:
    """Wait for one frame; None when the other side has hung up."""
    header = _read_exactly(channel, _LENGTH.size)
    if header is None:
        return None
    data = _read_exactly(channel, _LENGTH.unpack(header)[0])
    return None if data is None else json.loads(data)


def _read_exactly(channel: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        try:
            piece = channel.recv(size - len(data))
        except ConnectionError:
            return None
        if not piece:
            return None
        data += piece
    return bytes(data)

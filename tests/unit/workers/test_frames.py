"""Frames between a worker and who started it."""

import asyncio
import socket
import struct

import pytest

from quartet.workers import MAX_FRAME_BYTES, pack_frame, receive_frame
from quartet.workers.frames import read_frame, write_frame


async def received(data):
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return await receive_frame(reader)


FRAMES = [{}, {"episode": 1, "text": "é\n\0", "ids": [1, 2], "x": None, "y": -0.1, "z": True}]


@pytest.mark.parametrize("frame", FRAMES)
async def test_a_frame_arrives_as_it_was(frame):
    assert await received(pack_frame(frame)) == frame


@pytest.mark.parametrize("frame", FRAMES)
def test_both_sides_speak_the_same(frame):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        write_frame(ours, frame)
        assert read_frame(theirs) == frame
        ours.sendall(pack_frame(frame))
        assert read_frame(theirs) == frame
        ours.sendall(pack_frame(frame)[:-1])
        ours.close()
        assert read_frame(theirs) is None


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", asyncio.IncompleteReadError),
        (pack_frame({"a": 1})[:-1], asyncio.IncompleteReadError),
        (struct.pack(">I", MAX_FRAME_BYTES + 1), ValueError),
        (struct.pack(">I", 3) + b"[1]", ValueError),
        (struct.pack(">I", 3) + b"no!", ValueError),
    ],
)
async def test_what_is_no_frame(data, error):
    with pytest.raises(error):
        await received(data)

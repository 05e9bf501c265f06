"""What service and workers say to each other arrives as it was said."""

from __future__ import annotations

import asyncio

import pytest
from quartet_rollout.engines.vllm import channel

from quartet.errors import DeadlineError, RequestError
from quartet.testing.push import make_manifest
from quartet.types import IpcSegment, PrepareWeightsRequest, PushBackend, Rendezvous

REQUEST = PrepareWeightsRequest(
    request_id="push-1",
    epoch=7,
    policy_version=3,
    manifest=make_manifest(),
    backend=PushBackend.IPC,
    rendezvous=Rendezvous(ipc=IpcSegment(machine="m", size_bytes=9, cuda_handle=bytes(range(64)))),
    rank=2,
    world_size=5,
    group_timeout=4.5,
)


class Writer:
    """Collects what is written."""

    def __init__(self):
        self.data = b""

    def write(self, data):
        self.data += data


async def over(*messages):
    writer = Writer()
    for message in messages:
        channel.write(writer, message)
    reader = asyncio.StreamReader()
    reader.feed_data(writer.data)
    reader.feed_eof()
    return [await channel.read(reader) for _ in range(len(messages) + 1)]


async def test_all_messages_arrive_as_they_were():
    messages = [
        channel.Hello(rank=1),
        channel.AskRoom(epoch=7),
        channel.Room(epoch=7, free_bytes=1 << 40),
        channel.Join(request=REQUEST, shared_path="/proc/1/fd/3"),
        channel.Joined(epoch=7),
        channel.Receive(epoch=7),
        channel.Arrived(epoch=7, index=2),
        channel.Digested(epoch=7, index=2, digest="ab", error="\u00fc"),
        channel.Drop(epoch=7, abort=True),
    ]
    assert await over(*messages) == [*messages, None]


@pytest.mark.parametrize(
    "error",
    [
        RequestError("no room", reason="R", field="f", value="1", remedy="less"),
        DeadlineError("late", reason="WEIGHTS_GROUP_TIMEOUT"),
    ],
)
async def test_failures_keep_class_and_remedy(error):
    [broken, _] = await over(channel.Broken(epoch=7, error=error))
    assert isinstance(broken, channel.Broken)
    assert type(broken.error) is type(error)
    assert (broken.error.message, broken.error.info) == (error.message, error.info)

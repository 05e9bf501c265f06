"""Channels on a machine that is slow to answer."""

from __future__ import annotations

import asyncio

from quartet.clients import RewardClient
from quartet.testing.fakes import FakeReward
from quartet.testing.loopback import loopback

SLOW_SECONDS = 0.6
"""How long the server's side of a connection says nothing: more than any reconnect backoff."""


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


async def test_a_connection_that_opens_slowly_is_no_failed_call() -> None:
    # A loaded machine, or a server whose event loop is busy loading a model.
    async with loopback(FakeReward()) as address:
        host, port = address.rsplit(":", 1)

        async def slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(SLOW_SECONDS)
            behind, ahead = await asyncio.open_connection(host, int(port))
            await asyncio.gather(_pass_on(reader, ahead), _pass_on(behind, writer))

        server = await asyncio.start_server(slowly, "127.0.0.1", 0)
        slow = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with RewardClient(slow, retry=False) as client:
            info = await client.get_info()
        server.close()
    assert info.info.replica

"""Serves any Service in this process, on a free port of 127.0.0.1."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from quartet.config.rpc import RpcConfig
from quartet.rpc.server import Server, Service


@asynccontextmanager
async def loopback(service: Service, rpc: RpcConfig | None = None) -> AsyncIterator[str]:
    """Serve until the block is left; yields the address.

    It is the server that `quartet serve` runs, interceptors and all, without signals and files.

    Args:
        service: a room's service, or a fake.
        rpc: settings; by default any free port, and calls under way are cut off at the end.

    Example:
        >>> async with loopback(FakeReward()) as address, RewardClient(address) as client:
        ...     await client.wait_ready(5)
    """
    settings = rpc or replace(RpcConfig(), drain_seconds=0.0)
    server = Server(service, settings)
    address = await server.bind()
    try:
        await service.start()
        server.set_serving(True)
        yield address
    finally:
        await server.drain()
        await service.stop()

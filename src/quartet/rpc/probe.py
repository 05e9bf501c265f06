"""Asks a server whether it serves: `python -m quartet.rpc.probe ADDRESS [SERVICE]`.

Exit code 0 when it does, 1 when it does not or cannot be reached. For compose and systemd.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quartet.config.rpc import RpcConfig
from quartet.errors import ConfigError
from quartet.rpc.channel import create_channel

_TIMEOUT_SECONDS = 5.0


async def health_of(channel: grpc.aio.Channel, service: str, timeout: float) -> str:
    """SERVING, NOT_SERVING, UNKNOWN or SERVICE_UNKNOWN. Raises AioRpcError when nobody answers."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=service)
    try:
        answer = await stub.Check(request, timeout=timeout)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            return "SERVICE_UNKNOWN"
        raise
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


async def probe(address: str, service: str = "", timeout: float = _TIMEOUT_SECONDS) -> str:
    """State of `service` at `address`, or why there is none, as one line."""
    # A question about health carries nothing worth hiding.
    async with create_channel(address, RpcConfig(insecure=True), retry=False) as channel:
        try:
            return await health_of(channel, service, timeout)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m quartet.rpc.probe", description=__doc__)
    parser.add_argument("address", help="host:port or unix:/path")
    parser.add_argument("service", nargs="?", default="", help="full service name; all by default")
    parser.add_argument("--timeout", type=float, default=_TIMEOUT_SECONDS, help="seconds")
    options = parser.parse_args(arguments)
    try:
        state = asyncio.run(probe(options.address, options.service, options.timeout))
    except ConfigError as error:
        state = str(error)
    print(state)
    return 0 if state == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main())

"""The one place that makes channels."""

from __future__ import annotations

import grpc

from quartet.config.rpc import RpcConfig
from quartet.errors import ConfigError
from quartet.rpc import policy
from quartet.rpc.address import check_address, is_local_address


def create_channel(
    address: str, rpc: RpcConfig | None = None, *, retry: bool = True
) -> grpc.aio.Channel:
    """A channel to one address. It connects at its first call and belongs to the running loop.

    Args:
        address: "host:port", "unix:/path" or "dns:///name:port".
        rpc: settings; plain text to another machine needs `rpc.insecure`.
        retry: try idempotent calls again on UNAVAILABLE. Off where there are other replicas.

    Raises:
        ConfigError: no address, or plain text to another machine without `rpc.insecure`.
    """
    check_address(address)
    if not is_local_address(address) and not (rpc is not None and rpc.insecure):
        raise ConfigError(
            f"{address} is on another machine, and calls are plain text",
            field="address",
            value=address,
            remedy="pass --rpc.insecure on a private network",
        )
    options = policy.channel_options(retry=retry, spread=address.startswith("dns:"))
    return grpc.aio.insecure_channel(address, options=options)

"""How a service is reached and how it is watched."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from quartet.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class RpcConfig:
    """Where a service listens and how it comes and goes."""

    host: str = "127.0.0.1"
    """Address to listen on: a name, an IP address, or `unix:/path/to/socket` (without a port)."""
    port: int = 0
    """TCP port to listen on; 0 takes any free one."""
    ready_file: str | None = None
    """File that is written once the port is bound, as JSON: `address`, `metrics_address`, `pid`."""
    die_with_parent: bool = False
    """End when the process that started this one ends, however it ends (Linux)."""
    insecure: bool = False
    """Serve plain text to other machines; without it only loopback and unix sockets are served."""
    drain_seconds: float = 20.0
    """Longest time that calls under way may take to finish after SIGTERM, in seconds."""
    max_concurrent_calls: int = 256
    """Calls worked on at once; the next one is answered RESOURCE_EXHAUSTED."""

    def check(self) -> None:
        """Raise ConfigError for values that cannot be served."""
        if not 0 <= self.port <= 65535:
            raise _wrong("port", self.port, "is no TCP port", "give 0 (any free port) to 65535")
        if self.max_concurrent_calls < 1:
            raise _wrong(
                "max_concurrent_calls",
                self.max_concurrent_calls,
                "lets nobody in",
                "give 1 or more",
            )
        if not self.drain_seconds >= 0:
            raise _wrong("drain_seconds", self.drain_seconds, "is no time", "give 0 or more")
        if self.ready_file and not Path(self.ready_file).absolute().parent.is_dir():
            raise _wrong(
                "ready_file",
                self.ready_file,
                "is in a folder that is not there",
                "create the folder",
            )
        if not self.insecure and not is_local(self.host):
            raise _wrong(
                "host",
                self.host,
                "can be reached from other machines, and calls are plain text",
                "listen on 127.0.0.1 or unix:/path, or pass --rpc.insecure on a private network",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsConfig:
    """Where a process shows its Prometheus metrics."""

    host: str = "127.0.0.1"
    """Address that the metrics are served on."""
    port: int | None = None
    """TCP port that the metrics are served on; unset serves none, 0 takes any free one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpFrontConfig:
    """Where a reward service also answers `POST /get_reward`, as OpenRLHF's serve_rm does."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int | None = None
    """TCP port of OpenRLHF's `POST /get_reward`; unset opens none, 0 takes any free one."""

    def check(self, *, insecure: bool) -> None:
        """Raise ConfigError for an address that cannot, or must not, be served."""
        if self.port is None:
            return
        if not 0 <= self.port <= 65535:
            raise _wrong(
                "port", self.port, "is no TCP port", "give 0 (any free port) to 65535", "http"
            )
        if not insecure and not is_local(self.host):
            raise _wrong(
                "host",
                self.host,
                "can be reached from other machines, and HTTP is plain text",
                "listen on 127.0.0.1, or pass --rpc.insecure on a private network",
                "http",
            )


def is_local(host: str) -> bool:
    """True when `host` is a unix socket or loopback: nobody on another machine can reach it."""
    if host.startswith("unix:") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _wrong(
    name: str, value: object, problem: str, remedy: str, section: str = "rpc"
) -> ConfigError:
    flag = f"{section}.{name}"
    return ConfigError(f"{flag} {value} {problem}", field=flag, value=str(value), remedy=remedy)

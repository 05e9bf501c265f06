"""Addresses of services: "host:port", "unix:/path", "dns:///name:port", and lists of them.

Two kinds of entries stand for replicas that come and go: "dns:///name:port" for all hosts that the
name leads to, and "file:///path" for a file with an address a line. `rpc.resolve` reads them.
"""

from __future__ import annotations

from quartet.config.rpc import is_local
from quartet.errors import ConfigError

_SCHEMES = ("unix:", "dns:", "ipv4:", "ipv6:")
FILE_SCHEME = "file://"
DNS_SCHEME = "dns:///"


def split_addresses(text: str) -> tuple[str, ...]:
    """Cut a comma-separated list into its entries, each checked.

    Example:
        >>> split_addresses("h1:7001, h2:7001")
        ('h1:7001', 'h2:7001')

    Raises:
        ConfigError: an address that cannot be one, or one that is there twice.
    """
    addresses = tuple(part.strip() for part in text.split(",") if part.strip())
    if not addresses:
        raise _wrong(text, "names no server")
    for address in addresses:
        check_entry(address)
    if len(set(addresses)) < len(addresses):
        raise _wrong(text, "names a server twice")
    return addresses


def stands_for_several(entry: str) -> bool:
    """True when the replicas behind an entry of a list are found out, and may change."""
    return entry.startswith((DNS_SCHEME, FILE_SCHEME))


def check_entry(entry: str) -> None:
    """Raise ConfigError for what is no entry of a list of addresses."""
    if not entry.startswith(FILE_SCHEME):
        check_address(entry)
    elif not entry.removeprefix(FILE_SCHEME).startswith("/"):
        raise _wrong(entry, "has no absolute path")


def check_address(address: str) -> None:
    """Raise ConfigError for what is no address of one server."""
    if address.startswith("unix:"):
        if address in ("unix:", "unix://"):
            raise _wrong(address, "has no path")
        return
    host, colon, port = address.rpartition(":")
    if not colon or not host or host in _SCHEMES or not port.isdigit():
        raise _wrong(address, "has no port")
    if not 1 <= int(port) <= 65535:
        raise _wrong(address, f"has the port {port}, which is none")
    if ":" in host and not host.startswith("[") and not address.startswith(_SCHEMES):
        raise _wrong(address, "is an IPv6 address without brackets")


def is_local_address(address: str) -> bool:
    """True when calls to `address` cannot leave this machine."""
    if address.startswith("unix:"):
        return True
    for scheme in ("dns:///", "ipv4:", "ipv6:"):
        address = address.removeprefix(scheme)
    return is_local(address.rpartition(":")[0])


def _wrong(address: str, problem: str) -> ConfigError:
    return ConfigError(
        f"address {address!r} {problem}",
        field="address",
        value=address,
        remedy="write host:port, unix:/path, dns:///name:port, or file:///path for several",
    )

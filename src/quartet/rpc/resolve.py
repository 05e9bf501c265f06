"""Which addresses a list stands for now: names with several hosts, and files, are read again.

    dns:///name:port   every host that the name leads to. Those of IPv4 where there are any: a
                       host with addresses of both kinds is one replica and not two.
    file:///path       an address a line; what follows a # is a remark, and empty lines are fine.

What cannot be read in the middle of a run changes nothing: a name server that is away, or a file
that is being written, must not cost a run its replicas.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from quartet.errors import ConfigError
from quartet.rpc.address import (
    DNS_SCHEME,
    FILE_SCHEME,
    check_address,
    split_addresses,
    stands_for_several,
)

DNS_SECONDS = 5.0
"""How often a name is looked up. Name servers cache for about as long."""

LookUp = Callable[[str, int], Awaitable[Sequence[str]]]
"""Says which IP addresses a host's name leads to, given name and port. Raises OSError."""


@dataclass(slots=True, eq=False)
class _Source:
    """An entry that stands for several addresses."""

    entry: str
    found: tuple[str, ...] = ()
    problem: str = ""
    """Why it could not be read the last time."""
    candidate: tuple[str, ...] | None = None
    """What a file held when it was read last, if that is not what counts."""
    read_at: float | None = None


class AddressBook:
    """The addresses behind a list of entries, as they are now."""

    def __init__(
        self,
        entries: str | Sequence[str],
        *,
        look_up: LookUp | None = None,
        dns_seconds: float = DNS_SECONDS,
    ) -> None:
        """Hold a list; nothing is read yet.

        Args:
            entries: "host1:port,dns:///name:port,file:///path", or a sequence of such.
            look_up: asks the name server; None asks that of this machine.
            dns_seconds: how often names are looked up.

        Raises:
            ConfigError: an entry is none.
        """
        text = entries if isinstance(entries, str) else ",".join(entries)
        self.entries = split_addresses(text)
        self.fixed = tuple(e for e in self.entries if not stands_for_several(e))
        """Addresses that stay for as long as the run does."""
        self._sources = [_Source(e) for e in self.entries if stands_for_several(e)]
        self._look_up = look_up or _ask_name_server
        self._dns_seconds = dns_seconds

    @property
    def may_change(self) -> bool:
        """Whether there is anything to read again."""
        return bool(self._sources)

    @property
    def addresses(self) -> tuple[str, ...]:
        """All addresses as they were read last, each once, in the order of the entries."""
        found = [self.fixed, *(source.found for source in self._sources)]
        return tuple(dict.fromkeys(address for part in found for address in part))

    @property
    def problems(self) -> tuple[str, ...]:
        """Why entries could not be read, where they could not."""
        return tuple(source.problem for source in self._sources if source.problem)

    async def open(self) -> None:
        """Read everything for the first time. A name that leads nowhere yet is no failure.

        Raises:
            ConfigError: a file is not there, or holds what is no address.
        """
        for source in self._sources:
            await self._read(source)
            if source.problem and source.entry.startswith(FILE_SCHEME):
                raise ConfigError(
                    source.problem,
                    field="address",
                    value=source.entry,
                    remedy="write an address a line, host:port or unix:/path",
                )

    async def refresh(self) -> list[str]:
        """Read again what may have changed; returns what is wrong now and was not before."""
        before = self.problems
        for source in self._sources:
            await self._read(source)
        return [problem for problem in self.problems if problem not in before]

    async def _read(self, source: _Source) -> None:
        now = time.monotonic()
        is_first = source.read_at is None
        is_name = source.entry.startswith(DNS_SCHEME)
        if is_name and source.read_at is not None and now - source.read_at < self._dns_seconds:
            return
        source.read_at = now
        try:
            if is_name:
                source.found = await self._hosts(source.entry)
            else:
                read = await asyncio.to_thread(_lines, source.entry)
                # One that is being written is read whole at the next time.
                if is_first or read == source.candidate:
                    source.found = read
                source.candidate = read
        except (OSError, UnicodeError, ConfigError) as error:
            source.problem = f"{source.entry} cannot be read: {_cause(error)}"
        else:
            source.problem = ""

    async def _hosts(self, entry: str) -> tuple[str, ...]:
        host, _, port = entry.removeprefix(DNS_SCHEME).rpartition(":")
        numbers = sorted(set(await self._look_up(host.strip("[]"), int(port))))
        old = [n for n in numbers if ":" not in n]
        return tuple(f"{n}:{port}" for n in old) or tuple(f"[{n}]:{port}" for n in numbers)


async def _ask_name_server(host: str, port: int) -> list[str]:
    loop = asyncio.get_running_loop()
    answers = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(answer[4][0]) for answer in answers]


def _lines(entry: str) -> tuple[str, ...]:
    """The addresses in a file, in its order."""
    found: dict[str, None] = {}
    text = Path(entry.removeprefix(FILE_SCHEME)).read_text(encoding="utf-8")
    for line in text.splitlines():
        address = line.partition("#")[0].strip()
        if not address:
            continue
        if stands_for_several(address):
            raise ConfigError(f"{address!r} is no address of one server")
        check_address(address)
        found[address] = None
    return tuple(found)


def _cause(error: Exception) -> str:
    if isinstance(error, ConfigError):
        return error.message
    return (error.strerror if isinstance(error, OSError) else None) or str(error)

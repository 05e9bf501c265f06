"""Lists of addresses: names with several hosts, files that change, and what cannot be read."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from quartet.errors import ConfigError
from quartet.rpc.address import split_addresses, stands_for_several
from quartet.rpc.resolve import AddressBook


class Names:
    """A name server."""

    def __init__(self, *hosts: str) -> None:
        self.hosts = list(hosts)
        self.asked: list[tuple[str, int]] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append((host, port))
        if not self.hosts:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self.hosts


async def test_fixed_addresses_are_as_they_are() -> None:
    book = AddressBook("h1:7001, unix:/run/q.sock")
    assert not book.may_change
    await book.open()
    assert book.addresses == book.fixed == ("h1:7001", "unix:/run/q.sock")


async def test_a_name_stands_for_all_its_hosts() -> None:
    names = Names("10.0.0.2", "10.0.0.1", "10.0.0.2")
    book = AddressBook("h0:1,dns:///rollout:7001", look_up=names, dns_seconds=0)
    assert book.addresses == ("h0:1",)
    await book.open()
    assert names.asked == [("rollout", 7001)]
    assert book.addresses == ("h0:1", "10.0.0.1:7001", "10.0.0.2:7001")
    names.hosts = ["10.0.0.2", "10.0.0.3"]
    assert await book.refresh() == []
    assert book.addresses == ("h0:1", "10.0.0.2:7001", "10.0.0.3:7001")


async def test_a_host_with_both_kinds_of_address_is_one_replica() -> None:
    book = AddressBook("dns:///h:1", look_up=Names("fd00::1", "10.0.0.1"))
    await book.open()
    assert book.addresses == ("10.0.0.1:1",)
    book = AddressBook("dns:///h:1", look_up=Names("fd00::1"))
    await book.open()
    assert book.addresses == ("[fd00::1]:1",)


async def test_a_name_server_that_is_away_costs_no_replica() -> None:
    names = Names("10.0.0.1")
    book = AddressBook("dns:///h:1", look_up=names, dns_seconds=0)
    await book.open()
    names.hosts = []
    (problem,) = await book.refresh()
    assert problem == "dns:///h:1 cannot be read: Name or service not known"
    assert await book.refresh() == []  # it is said once
    assert book.addresses == ("10.0.0.1:1",)
    names.hosts = ["10.0.0.4"]
    assert await book.refresh() == []
    assert book.problems == ()
    assert book.addresses == ("10.0.0.4:1",)


async def test_a_name_that_leads_nowhere_yet_is_no_failure() -> None:
    book = AddressBook("dns:///h:1", look_up=Names(), dns_seconds=0)
    await book.open()
    assert book.addresses == ()
    assert "Name or service not known" in book.problems[0]


async def test_names_are_not_looked_up_all_the_time() -> None:
    names = Names("10.0.0.1")
    book = AddressBook("dns:///h:1", look_up=names, dns_seconds=1000)
    await book.open()
    await book.refresh()
    assert len(names.asked) == 1


async def test_the_name_server_of_this_machine() -> None:
    book = AddressBook("dns:///localhost:7001")
    await book.open()
    assert book.addresses == ("127.0.0.1:7001",)


async def test_a_file_holds_an_address_a_line(tmp_path: Path) -> None:
    file = tmp_path / "rollouts"
    file.write_text("# engines\n\nh1:7001\nh2:7001  # the fast one\nh1:7001\nunix:/a\n")
    book = AddressBook(f"file://{file}")
    await book.open()
    assert book.addresses == ("h1:7001", "h2:7001", "unix:/a")


async def test_a_change_of_a_file_counts_when_it_is_read_twice(tmp_path: Path) -> None:
    file = tmp_path / "rollouts"
    file.write_text("h1:7001\n")
    book = AddressBook(f"file://{file}")
    await book.open()
    file.write_text("h1:70")  # somebody is writing
    await book.refresh()
    assert book.addresses == ("h1:7001",)
    file.write_text("h1:7001\nh2:7002\n")
    await book.refresh()
    assert book.addresses == ("h1:7001",)
    await book.refresh()
    assert book.addresses == ("h1:7001", "h2:7002")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("h1\n", "address 'h1' has no port"),
        ("dns:///h:1\n", "'dns:///h:1' is no address of one server"),
        (None, "No such file or directory"),
    ],
)
async def test_a_broken_file_ends_a_start_and_not_a_run(
    tmp_path: Path, text: str | None, why: str
) -> None:
    file = tmp_path / "rollouts"

    def write(content: str | None) -> None:
        if content is None:
            file.unlink(missing_ok=True)
        else:
            file.write_text(content)

    write(text)
    with pytest.raises(ConfigError) as caught:
        await AddressBook(f"file://{file}").open()
    assert f"file://{file} cannot be read: {why}" in str(caught.value)
    write("h1:7001\n")
    book = AddressBook(f"file://{file}")
    await book.open()
    write(text)
    (problem,) = await book.refresh()
    assert why in problem
    assert book.addresses == ("h1:7001",)


async def test_an_address_that_is_listed_twice_is_one_replica(tmp_path: Path) -> None:
    file = tmp_path / "rollouts"
    file.write_text("h1:7001\n")
    book = AddressBook(f"h1:7001,file://{file}")
    await book.open()
    assert book.addresses == ("h1:7001",)


def test_entries() -> None:
    assert split_addresses("file:///a/b, dns:///n:1") == ("file:///a/b", "dns:///n:1")
    assert [stands_for_several(e) for e in ("file:///a", "dns:///n:1", "h:1", "unix:/a")] == [
        True,
        True,
        False,
        False,
    ]
    for wrong in ("file://a", "file:/a", "dns:///n", f"file://{os.sep}x,file://{os.sep}x"):
        with pytest.raises(ConfigError):
            split_addresses(wrong)

"""Checkpoints, the run's name, and addresses."""

from __future__ import annotations

import re
from collections.abc import Iterator

from quartet.config.derive import split_list
from quartet.config.methods import TrainerConfig
from quartet.config.rpc import is_local
from quartet.config.tree import leaves, value_of, wrong
from quartet.errors import ConfigError

FILE_SCHEME = "file://"
"""A file with addresses, which may change: for roles with replicas."""
_HOST_PORT = re.compile(r"^(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})$")


def check_checkpoints(config: TrainerConfig) -> Iterator[ConfigError]:
    """A save writes something."""
    if config.ckpt.save_steps > 0 and config.ckpt.disable_ds and not config.ckpt.save_hf:
        yield wrong(
            "ckpt.save_steps",
            config.ckpt.save_steps,
            "with --ckpt.disable_ds and without --ckpt.save_hf nothing would be written",
            "leave --ckpt.disable_ds away, or add --ckpt.save_hf",
        )


def check_run_name(config: TrainerConfig) -> Iterator[ConfigError]:
    """The name of a run is that of one folder below --run.dir."""
    name = config.run.name
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        yield wrong(
            "run.name",
            name,
            "is no name of a folder",
            "give a name without slashes; --run.dir says where its folder is",
        )


def check_addresses(config: TrainerConfig) -> Iterator[ConfigError]:
    """Every address can be dialled."""
    for name in leaves(type(config)):
        if not name.endswith(".address"):
            continue
        entries = split_list(value_of(config, name))
        for entry in entries:
            if entry.startswith(FILE_SCHEME) and not name.startswith(("learner.", "critic.")):
                # Its lines are looked at when it is read.
                if not entry.removeprefix(FILE_SCHEME).startswith("/"):
                    yield wrong(name, entry, "has no absolute path", "write file:///path")
                continue
            if _dialable(entry) and not config.rpc.insecure and not _stays_here(entry):
                yield wrong(
                    name,
                    entry,
                    "is on another machine, and calls are plain text",
                    "add --rpc.insecure on a private network",
                )
            if not _dialable(entry):
                yield wrong(
                    name,
                    entry,
                    "is no address",
                    "write host:port, unix:/path, dns:///name:port, or file:///path for several",
                )
        if len(entries) > 1 and name.startswith(("learner.", "critic.")):
            yield wrong(
                name,
                ",".join(entries),
                "one learner trains a model; its ranks are behind one address",
                "give one address",
            )


def _dialable(entry: str) -> bool:
    if entry.startswith(("unix:", "unix-abstract:")):
        return len(entry.partition(":")[2]) > 0
    match = _HOST_PORT.match(entry.removeprefix("dns:///"))
    return match is not None and 0 < int(match[1]) <= 65535


def _stays_here(entry: str) -> bool:
    if entry.startswith("unix"):
        return True
    return is_local(entry.removeprefix("dns:///").rpartition(":")[0])

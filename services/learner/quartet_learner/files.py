"""Writing so that a reader sees a whole folder or none, also after a crash."""

from __future__ import annotations

import json
import os
import shutil
import uuid
import zlib
from pathlib import Path
from typing import Any

_BLOCK = 4 << 20


def aside_of(folder: Path) -> Path:
    """A new hidden folder beside `folder`, on the same disk, to write in before `put_in_place`."""
    aside = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp"
    aside.mkdir(parents=True)
    return aside


def remove_leftovers(folder: Path) -> None:
    """Remove what processes that were killed while they wrote in `folder` have left aside."""
    for aside in folder.glob(".*.tmp"):
        if aside.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.unlink(missing_ok=True)


def put_in_place(aside: Path, folder: Path) -> None:
    """Make everything in `aside` durable, then give it its name, replacing what had it."""
    for file in sorted(aside.rglob("*")):
        if file.is_file():
            sync(file)
    sync(aside)
    if folder.exists():
        old = aside_of(folder)
        folder.rename(old / "old")
        aside.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    else:
        aside.rename(folder)
    sync(folder.parent)


def write_atomically(file: Path, text: str) -> None:
    """Replace a small file as a whole and make it durable."""
    aside = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}.tmp")
    aside.write_text(text)
    sync(aside)
    aside.replace(file)
    sync(file.parent)


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, onto the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def inventory(folder: Path) -> dict[str, dict[str, int]]:
    """Size and CRC-32 of every file below `folder`, by relative name."""
    return {
        str(file.relative_to(folder)): {"size": file.stat().st_size, "crc32": checksum(file)}
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def checksum(file: Path) -> int:
    """CRC-32 of a file's bytes."""
    total = 0
    with file.open("rb") as opened:
        while block := opened.read(_BLOCK):
            total = zlib.crc32(block, total)
    return total


def first_damage(folder: Path, expected: dict[str, dict[str, int]]) -> str:
    """Name of the first file that is not as `inventory` found it, with what is wrong, or ""."""
    for name, facts in expected.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != facts["size"]:
            return f"{name} has {file.stat().st_size} of {facts['size']} bytes"
        if checksum(file) != facts["crc32"]:
            return f"{name} has other contents than were written"
    return ""


def size_of(folder: Path) -> int:
    """Bytes of all files below `folder`."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object."""
    return json.loads(file.read_text())

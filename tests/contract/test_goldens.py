"""Bytes written by older versions still mean the same."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


def load_tool() -> Any:
    """tools/wire_goldens.py as a module: tools is no package."""
    spec = importlib.util.spec_from_file_location("wire_goldens", ROOT / "tools/wire_goldens.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


TOOL = load_tool()


def plain(value: Any) -> Any:
    """A value that == compares whole: arrays as their type and bytes."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if dataclasses.is_dataclass(value):
        return [type(value)] + [
            plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        ]
    if isinstance(value, tuple):
        return [plain(each) for each in value]
    return value


@pytest.mark.parametrize("name", sorted(TOOL.GOLDENS))
def test_golden(name: str) -> None:
    value, encode, decode = TOOL.GOLDENS[name]
    message = type(encode(value)).FromString((TOOL.FOLDER / f"{name}.binpb").read_bytes())
    assert plain(decode(message)) == plain(value)


def test_no_golden_is_left_without_a_meaning() -> None:
    files = {path.stem for path in TOOL.FOLDER.glob("*.binpb")}
    assert files == set(TOOL.GOLDENS)

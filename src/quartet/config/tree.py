"""The settings as a tree: dotted names of all values of a configuration class, and their types."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from quartet.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """One value of a configuration class."""

    name: str
    """Dotted, as in the flag: actor.adam.lr."""
    type: Any
    """Resolved type: int, float, tuple[float, float], str | None, ..."""
    owner: type
    """The section's dataclass."""
    field: dataclasses.Field[Any]
    """The section's field."""

    @property
    def is_bool(self) -> bool:
        """True for flags without a value."""
        return self.type is bool

    @property
    def is_sequence(self) -> bool:
        """True when several values follow the flag."""
        return any(typing.get_origin(option) is tuple for option in self.options)

    @property
    def is_text(self) -> bool:
        """True when the value is taken letter by letter, as for names and paths."""
        return any(
            option is str or typing.get_origin(option) is typing.Literal for option in self.options
        )

    @property
    def is_optional(self) -> bool:
        """True when None is a value."""
        return type(None) in self.options

    @property
    def options(self) -> tuple[Any, ...]:
        """Members of the union that the type is; the type alone where it is none."""
        if typing.get_origin(self.type) in (typing.Union, types.UnionType):
            return typing.get_args(self.type)
        return (self.type,)

    @property
    def type_name(self) -> str:
        """The type for people: int, float x2, str {bf16,fp16}."""
        return "|".join(_type_name(option) for option in self.options if option is not type(None))


def _type_name(option: Any) -> str:
    if typing.get_origin(option) is typing.Literal:
        return "str {" + ",".join(str(choice) for choice in typing.get_args(option)) + "}"
    if typing.get_origin(option) is tuple:
        members = typing.get_args(option)
        count = "*" if members[-1] is Ellipsis else str(len(members))
        return f"{_type_name(members[0])} x{count}"
    return str(getattr(option, "__name__", option))


@lru_cache
def leaves(cls: type) -> Mapping[str, Leaf]:
    """All values of a configuration class by dotted name, in the order of --help."""
    return {leaf.name: leaf for leaf in _walk(cls, "")}


@lru_cache
def sections(cls: type) -> frozenset[str]:
    """Dotted names of all sections and sub-sections."""
    names = set[str]()
    for name in leaves(cls):
        while "." in name:
            name = name.rpartition(".")[0]
            names.add(name)
    return frozenset(names)


def _walk(cls: type, prefix: str) -> Iterator[Leaf]:
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        name, kind = prefix + item.name, hints[item.name]
        if dataclasses.is_dataclass(kind):
            yield from _walk(typing.cast(type, kind), name + ".")
        else:
            yield Leaf(name=name, type=kind, owner=cls, field=item)


def value_of(config: Any, name: str) -> Any:
    """The value with a dotted name."""
    for part in name.split("."):
        config = getattr(config, part)
    return config


def flat(config: Any) -> dict[str, Any]:
    """All values by dotted name."""
    return {name: value_of(config, name) for name in leaves(type(config))}


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """A tree of dictionaries from values by dotted name."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *path, last = name.split(".")
        branch = tree
        for part in path:
            branch = branch.setdefault(part, {})
        branch[last] = value
    return tree


def suggestion(word: str, known: Iterable[str], prefix: str = "") -> str:
    """'did you mean ...?' with the closest known word, or nothing.

    Beginnings and last parts count first: people drop the ends and the sections of names.
    """
    words = list(known)
    last = word.rpartition(".")[2]
    section = word.partition(".")[0] + "."
    same_end = [name for name in words if name.rpartition(".")[2] == last]
    same_end.sort(key=lambda name: not name.startswith(section))
    candidates = [
        *[name for name in same_end if name.startswith(section)],
        *[name for name in words if name.startswith(word)],
        *same_end,
        *get_close_matches(word, words, n=1, cutoff=0.75),
        *[n for n in words if get_close_matches(last, [n.rpartition(".")[2]], cutoff=0.8)],
        *get_close_matches(word, words, n=1, cutoff=0.6),
    ]
    return f"did you mean {prefix}{candidates[0]}?" if candidates else ""


def wrong(name: str, value: object, problem: str, remedy: str) -> ConfigError:
    """The error for a value: names the flag, what is wrong with it, and what to do."""
    shown = "" if value is None else f" {_shown(value)}"
    return ConfigError(
        f"--{name}{shown}: {problem}", field=name, value=_shown(value), remedy=remedy
    )


def _shown(value: object) -> str:
    if isinstance(value, tuple | list):
        return " ".join(_shown(item) for item in value)
    return str(value)

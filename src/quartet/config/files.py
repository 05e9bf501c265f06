"""Settings as YAML, by the rules of YAML 1.2: what looks like a word is one.

PyYAML follows YAML 1.1, where `5e-7` is a string, `off` is false, `12:30` is 750 and a key that
comes twice silently wins. All four would hit users here, so reader and writer have their own
resolvers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from quartet.config.aliases import canonical_name
from quartet.config.tree import flat, leaves, nested, sections, suggestion
from quartet.errors import ConfigError

SECRETS = frozenset({"logger.wandb.key", "rollout.server_key"})
"""Values that are never written to a file or a log."""

_RESOLVERS = (
    ("bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF"),
    ("int", re.compile(r"^[-+]?[0-9]+$"), "-+0123456789"),
    (
        "float",
        re.compile(
            r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        "-+.0123456789",
    ),
    ("null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
)


class _Loader(yaml.SafeLoader):
    """Reads YAML 1.2's core schema and refuses a key that comes twice."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012 - PyYAML's own interface

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set[str]()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value} comes twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads back as the same value."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012 - PyYAML's own interface

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _kind, _pattern, _first in _RESOLVERS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", _pattern, list(_first))


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(str(loader.construct_scalar(node)))


def _construct_float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    return float(
        str(loader.construct_scalar(node)).lower().replace(".inf", "inf").replace(".nan", "nan")
    )


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)


def parse_scalar(text: str) -> Any:
    """One value as YAML 1.2 reads it: 5e-7 is a number, off is a word, [1, 2] is a list."""
    return yaml.load(text, Loader=_Loader)


def read_values(text: str, cls: type, source: str) -> dict[str, Any]:
    """Values by dotted name from YAML text. Nested and dotted keys may be mixed.

    Args:
        text: YAML.
        cls: the configuration class; a key that it does not have is an error.
        source: the file's name, for messages.

    Raises:
        ConfigError: not YAML, not a mapping, or an unknown key.
    """
    try:
        tree = parse_scalar(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{source}:{mark.line + 1}" if mark else source
        problem = getattr(error, "problem", None) or "this is not YAML"
        raise ConfigError(f"{place}: {problem}", field="config", value=source) from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{source}: expected sections with values, found {type(tree).__name__}",
            field="config",
            value=source,
        )
    values: dict[str, Any] = {}
    _collect(tree, "", cls, source, values)
    return values


def _collect(
    tree: dict[Any, Any], prefix: str, cls: type, source: str, values: dict[str, Any]
) -> None:
    known, groups = leaves(cls), sections(cls)
    for key, value in tree.items():
        name = canonical_name(f"{prefix}{key}", cls)
        if name in known:
            values[name] = value
        elif name in groups and isinstance(value, dict):
            _collect(value, name + ".", cls, source, values)
        elif name in groups and value is None:
            continue
        elif name in groups:
            raise ConfigError(
                f"{source}: {name} is a section, but has the value {value!r}", field=name
            )
        else:
            raise ConfigError(
                f"{source}: unknown key {name}",
                field=name,
                value=source,
                remedy=suggestion(name, [*known, *groups]) or "see --help for the keys",
            )


def read_file(path: str, cls: type) -> dict[str, Any]:
    """Values by dotted name from a YAML file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--config {path}: {error.strerror or error}",
            field="config",
            value=path,
            remedy="give the path of a readable YAML file",
        ) from error
    return read_values(text, cls, path)


def to_yaml(config: Any) -> str:
    """All values of a configuration as YAML, without secrets. `load.from_yaml` reads it back."""
    values = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in flat(config).items()
        if name not in SECRETS
    }
    return yaml.dump(nested(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)

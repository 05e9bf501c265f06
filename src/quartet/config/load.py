"""From default, files, environment and flags to one configuration; what comes later wins.

No flag is completed from its beginning, and none is unknown in silence: names are checked here,
before tyro parses the values.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from quartet.config.aliases import GONE, canonical_name
from quartet.config.files import parse_scalar, read_file, read_values
from quartet.config.tree import Leaf, flat, leaves, nested, suggestion
from quartet.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

ENV_PREFIX = "QUARTET_"

C = TypeVar("C")


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded(Generic[C]):
    """A configuration and where its values come from."""

    config: C
    origins: Mapping[str, str] = field(default_factory=dict)
    """For each value that was given: the file, the environment's variable, or the flag."""


def load(
    cls: type[C],
    args: Sequence[str],
    *,
    environ: Mapping[str, str] | None = None,
    known_elsewhere: Iterable[type] = (),
) -> Loaded[C]:
    """Read a configuration: default < --config FILE, in order < QUARTET_A__B < flags.

    Args:
        cls: configuration class.
        args: the command line after the command's name.
        environ: the environment; None is this process's.
        known_elsewhere: configuration classes of other commands, whose variables may be set too.

    Raises:
        ConfigError: an unknown name or a value of the wrong type, with its origin.
    """
    files, rest = _take_files(args)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for path in files:
        found = read_file(path, cls)
        values.update(found)
        origins.update(dict.fromkeys(found, path))
    for name, (variable, value) in _from_environment(
        cls, os.environ if environ is None else environ, known_elsewhere
    ).items():
        values[name], origins[name] = value, variable
    flags = _normalise(cls, rest)
    default = build(cls, values, origins)
    config = _parse(cls, flags, default)
    origins.update({name: f"--{name}" for name in _named(cls, flags)})
    return Loaded(config=config, origins=origins)


def build(cls: type[C], values: Mapping[str, Any], origins: Mapping[str, str]) -> C:
    """A configuration from values by dotted name, each checked against its type.

    Raises:
        ConfigError: names the value, and the file or variable that it came from.
    """
    if not values:
        return cls()
    from pydantic import ValidationError

    merged = flat(cls()) | dict(values)
    try:
        return _reader(cls).validate_python(nested(merged))
    except ValidationError as error:
        raise _explained(error.errors()[0], cls, origins) from error


@lru_cache
def _reader(cls: type[C]) -> TypeAdapter[C]:
    """Pydantic's reader of a class; it takes a while to make."""
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


def from_yaml(cls: type[C], text: str, source: str = "configuration") -> C:
    """A configuration from YAML; what the text leaves out has its default."""
    values = read_values(text, cls, source)
    return build(cls, values, dict.fromkeys(values, source))


def _explained(detail: Any, cls: type, origins: Mapping[str, str]) -> ConfigError:
    """One sentence of pydantic's first complaint."""
    path = [str(part) for part in detail["loc"]]
    name = ".".join(path)
    while path and name not in leaves(cls):
        path.pop()
        name = ".".join(path)
    known = leaves(cls).get(name)
    expected = f"expected {known.type_name}" if known else str(detail["msg"])
    return ConfigError(
        f"{origins.get(name, 'configuration')}: {name} is {detail['input']!r}: {expected}",
        field=name,
        value=str(detail["input"]),
    )


def _take_files(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split `--config FILE`, which may come often, from the other arguments."""
    files, rest, words = list[str](), list[str](), iter(args)
    for word in words:
        if word == "--config":
            path = next(words, None)
            if path is None:
                raise ConfigError("--config: the file's name is missing", field="config")
            files.append(path)
        elif word.startswith("--config="):
            files.append(word.partition("=")[2])
        else:
            rest.append(word)
    return files, rest


def _from_environment(
    cls: type, environ: Mapping[str, str], known_elsewhere: Iterable[type]
) -> dict[str, tuple[str, Any]]:
    """Values by dotted name from variables like QUARTET_ACTOR__ADAM__LR."""
    found: dict[str, tuple[str, Any]] = {}
    for variable in sorted(environ):
        if not variable.startswith(ENV_PREFIX):
            continue
        spelled = variable.removeprefix(ENV_PREFIX).lower().replace("__", ".")
        name = canonical_name(spelled, cls)
        if name in leaves(cls):
            found[name] = (variable, _env_value(leaves(cls)[name], environ[variable]))
        elif "." in name and not any(name in leaves(other) for other in known_elsewhere):
            close = suggestion(name, leaves(cls))
            remedy = close.replace(".", "__").upper() if close else ""
            raise ConfigError(
                f"{variable}: no command has a setting {name}",
                field=name,
                remedy=_env_hint(remedy) or "unset the variable",
            )
    return found


def _env_hint(shouted: str) -> str:
    """'did you mean QUARTET_X?' from its upper-case form."""
    match = re.match(r"DID YOU MEAN (\S+)\?", shouted)
    return f"did you mean {ENV_PREFIX}{match[1]}?" if match else ""


def _env_value(leaf: Leaf, text: str) -> Any:
    """A variable's text as a value: words stay words, lists may be written `0.2 0.28`."""
    if leaf.is_optional and text in ("", "null", "None", "none"):
        return None
    if leaf.is_sequence and not text.lstrip().startswith("["):
        return [parse_scalar(part) for part in re.split(r"[\s,]+", text.strip()) if part]
    if leaf.is_text:
        return text
    return parse_scalar(text)


def _normalise(cls: type, args: Sequence[str]) -> list[str]:
    """Bring flags to their one spelling; refuse those that the command does not have."""
    known = leaves(cls)
    words = list[str]()
    for word in args:
        if not _is_flag(word):
            words.append(_not_after_bool(word, words, known))
            continue
        spelled, equals, value = word.removeprefix("--").partition("=")
        name = canonical_name(spelled.replace("-", "_"), cls)
        positive = _positive(name, known)
        if positive is None:
            raise _unknown(spelled, known)
        if equals and known[positive].is_bool:
            words.append(_bool_flag(name, positive, value))
        elif equals:
            words += [f"--{name}={value}"] if value.startswith("-") else [f"--{name}", value]
        else:
            words.append(f"--{name}")
    return words


def _not_after_bool(word: str, words: Sequence[str], known: Mapping[str, Leaf]) -> str:
    """Explain `--flag true`, which other tools want, rather than find a stray word."""
    name = words[-1].removeprefix("--") if words and _is_flag(words[-1]) else ""
    positive = _positive(name, known)
    if positive and known[positive].is_bool and word.lower() in ("true", "false"):
        raise _takes_no_value(f"--{name} {word}", positive, word)
    return word


def _is_flag(word: str) -> bool:
    return word.startswith("--") and len(word) > 2


def _positive(name: str, known: Mapping[str, Leaf]) -> str | None:
    """The value that a flag sets: itself, or what its `no_` form turns off."""
    if name in known:
        return name
    section, dot, last = name.rpartition(".")
    positive = f"{section}{dot}{last.removeprefix('no_')}"
    return positive if positive in known and known[positive].is_bool else None


def _bool_flag(name: str, positive: str, value: str) -> str:
    """`--a=true` and `--a=false` as a bare flag."""
    if name != positive or value.lower() not in ("true", "false"):
        raise _takes_no_value(f"--{name}={value}", positive, value)
    return f"--{positive}" if value.lower() == "true" else f"--{_negative(positive)}"


def _takes_no_value(written: str, name: str, value: str) -> ConfigError:
    return ConfigError(
        f"{written}: this flag takes no value",
        field=name,
        value=value,
        remedy=f"write --{name}, or --{_negative(name)} to turn it off",
    )


def _negative(name: str) -> str:
    section, dot, last = name.rpartition(".")
    return f"{section}{dot}no_{last}"


def _unknown(name: str, known: Mapping[str, Leaf]) -> ConfigError:
    plain = name.replace("-", "_")
    remedy = GONE.get(plain) or suggestion(plain, known, "--") or "see --help for the flags"
    return ConfigError(f"--{name}: there is no such flag", field=plain, remedy=remedy)


def _named(cls: type, flags: Sequence[str]) -> set[str]:
    """Names of the values that flags set."""
    names = (_positive(word[2:].partition("=")[0], leaves(cls)) for word in flags if _is_flag(word))
    return {name for name in names if name}


def _parse(cls: type[C], flags: Sequence[str], default: C) -> C:
    """Let tyro read the flags' values; its complaint becomes one line."""
    if not flags:
        return default
    import tyro

    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(
                cls,
                default=default,
                args=list(flags),
                use_underscores=True,
            )
    except SystemExit:
        raise ConfigError(_plain(_one_line(complaint.getvalue()), cls)) from None


def _one_line(box: str) -> str:
    """The first paragraph inside the frame that tyro draws."""
    lines = list[str]()
    for line in box.splitlines()[1:]:
        text = line.strip("│ ").strip()
        if not text or set(text) <= set("─╰╯├┤"):
            break
        lines.append(text)
    return " ".join(lines) or "the command line cannot be read"


def _plain(complaint: str, cls: type) -> str:
    """Say which type was expected, rather than what Python's int() said."""
    match = re.match(r"Error parsing --(\S+): .*?('[^']*')?$", complaint)
    if not match or match[1] not in leaves(cls):
        return complaint
    return f"--{match[1]} {match[2] or ''}: expected {leaves(cls)[match[1]].type_name}"

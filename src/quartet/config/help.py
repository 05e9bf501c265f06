"""--help, from the docstrings under the fields. docs/flags.md is made from the same."""

from __future__ import annotations

import ast
import inspect
import shutil
import textwrap
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from quartet.config.aliases import aliases_of
from quartet.config.support import EXPLAINED, REFUSED
from quartet.config.tree import Leaf, flat, leaves

GENERAL = """\
Also: --config FILE (YAML; several are laid over each other), --dry-run (print the plan and end),
and environment variables such as {variable}.
A flag wins over the environment, the environment over files. Flags without a value have a form
that turns them off: --{negative}.
"""


def docstring(leaf: Leaf) -> str:
    """The docstring under a field, as one paragraph."""
    for cls in leaf.owner.__mro__:
        text = _field_docs(cls).get(leaf.field.name)
        if text:
            return " ".join(text.split())
    return ""


@lru_cache
def _field_docs(cls: type) -> dict[str, str]:
    """Docstrings of the fields that a class itself declares."""
    if cls.__module__ == "builtins":
        return {}
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            docs[field.target.id] = str(after.value.value)
    return docs


def shown_default(value: Any) -> str:
    """A default as it is typed on a command line."""
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return repr(value) if isinstance(value, str) and (not value or " " in value) else str(value)


def help_text(cls: type, prog: str) -> str:
    """All flags of a command, section by section."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 110)
    setting, switch = _examples(cls)
    section, dot, last = switch.rpartition(".")
    lines = [
        f"usage: {prog} [flags]",
        "",
        inspect.cleandoc(cls.__doc__ or ""),
        "",
        GENERAL.format(
            variable="QUARTET_" + setting.replace(".", "__").upper(),
            negative=f"{section}{dot}no_{last}",
        ).rstrip(),
    ]
    defaults = flat(cls())
    previous: str | None = None
    for name, leaf in leaves(cls).items():
        group = name.partition(".")[0] if "." in name else ""
        if group != previous:
            lines += ["", f"{group or 'general'}:"]
            previous = group
        lines += _flag_lines(leaf, defaults[name], cls, width)
    return "\n".join(lines) + "\n"


def _examples(cls: type) -> tuple[str, str]:
    """A flag to set by a variable and one to turn off, both honoured."""
    honoured = {name: leaf for name, leaf in leaves(cls).items() if name not in REFUSED}
    setting = next((name for name in honoured if name.endswith(".lr")), next(iter(honoured)))
    switches = [name for name, leaf in honoured.items() if leaf.is_bool and "." in name]
    switches.sort(key=lambda name: not name.endswith("_enable"))
    return setting, switches[0]


def _flag_lines(leaf: Leaf, default: Any, cls: type, width: int) -> Iterator[str]:
    spellings = ", ".join(f"--{name}" for name in (leaf.name, *aliases_of(leaf.name, cls)))
    yield f"  {spellings}" + ("" if leaf.is_bool else f" {leaf.type_name}")
    text = docstring(leaf)
    reason = REFUSED.get(leaf.name)
    if reason is not None:
        text += f" Not in this release: {reason.instead}."
    elif leaf.name in EXPLAINED and EXPLAINED[leaf.name] not in text:
        text += f" {EXPLAINED[leaf.name]}"
    text += f" (default: {shown_default(default)})"
    yield from textwrap.wrap(text, width, initial_indent=" " * 8, subsequent_indent=" " * 8)

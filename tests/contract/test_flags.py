"""OpenRLHF's flags parse with the same names, types and defaults; ours are listed."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from quartet import config
from quartet.config.help import docstring
from quartet.config.load import load
from quartet.config.support import EXPLAINED, REFUSED
from quartet.config.tree import flat, leaves

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CLASSES = {
    "ppo": config.PpoConfig,
    "sft": config.SftConfig,
    "rm": config.RmConfig,
    "dpo": config.DpoConfig,
    "serve_rm": config.RewardServeConfig,
}
ALL = (
    *CLASSES.values(),
    config.RolloutServeConfig,
    config.RefServeConfig,
    config.LearnerServeConfig,
)
COUNTS = {"ppo": 167, "sft": 77, "rm": 79, "dpo": 82, "serve_rm": 14}
SPELLED_DIFFERENTLY = {"host": "rpc.host", "port": "rpc.port"}
DELIBERATE = {
    ("serve_rm", "host"): "127.0.0.1",  # nobody else reaches a server that has no key
    ("serve_rm", "port"): "0",  # any free port; deployments give one
}


def incumbent(name: str) -> list[tuple[str, str, str]]:
    rows = (HERE / f"flags_{name}.txt").read_text(encoding="utf-8").splitlines()
    return [tuple(row.split("\t")) for row in rows if not row.startswith("#")]  # type: ignore[misc]


CASES = [(name, *row) for name in CLASSES for row in incumbent(name)]


@pytest.mark.parametrize("name", CLASSES)
def test_the_list_is_complete(name: str):
    assert len({flag for flag, _, _ in incumbent(name)}) == COUNTS[name]


@pytest.mark.parametrize(
    ("name", "flag", "kind", "default"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES]
)
def test_name_type_and_default(name: str, flag: str, kind: str, default: str):
    cls = CLASSES[name]
    known = leaves(cls)
    if kind == "flag(false)":
        positive = flag.replace(".no_", ".")
        assert known[positive].is_bool
        assert flat(cls())[positive] is (default == "True")
        assert load(cls, [f"--{flag}"], environ={}).config != cls()
        return
    leaf = known[SPELLED_DIFFERENTLY.get(flag, flag)]
    assert same_type(leaf.type_name, kind)
    value = flat(cls())[leaf.name]
    assert same_value(value, DELIBERATE.get((name, flag), default)), (value, default)


def same_type(ours: str, theirs: str) -> bool:
    """Ours is theirs, or takes more."""
    if theirs.startswith("flag"):
        return ours == "bool"
    if theirs.startswith("str {"):
        return set(choices(theirs)) <= set(choices(ours))
    if theirs == "int" and ours == "float":
        return True
    return ours == theirs.replace("x+", "x*")


def choices(type_name: str) -> list[str]:
    return type_name.removeprefix("str {").removesuffix("}").split(",")


def same_value(value: object, text: str) -> bool:
    if text.endswith("_<MMDDTHH:MM>"):
        return bool(re.fullmatch(text.replace("<MMDDTHH:MM>", r"\d{4}T\d\d:\d\d"), str(value)))
    if isinstance(value, tuple):
        parts = text.split()
        return len(parts) == len(value) and all(map(same_value, value, parts))
    if isinstance(value, float):
        return value == float(text)
    return str(value) == text.replace("\\n", "\n").strip("'")


@pytest.mark.parametrize("name", CLASSES)
def test_all_flags_at_once_with_their_defaults_change_nothing(name: str):
    cls = CLASSES[name]
    defaults, line = flat(cls()), list[str]()
    for flag, kind, _ in incumbent(name):
        value = defaults.get(SPELLED_DIFFERENTLY.get(flag, flag))
        if kind.startswith("flag") or value is None:
            continue
        values = value if isinstance(value, tuple) else (value,)
        line += [f"--{flag}", *map(str, values)]
    loaded = load(cls, line, environ={})
    ours = flat(loaded.config)
    stamped = {"logger.wandb.run_name", "run.name"}
    assert {k: v for k, v in ours.items() if k not in stamped} == {
        k: v for k, v in defaults.items() if k not in stamped
    }
    assert len(loaded.origins) > len(line) / 4


def test_what_we_added_is_listed():
    """Additions are deliberate and removals are announced."""
    listed = (HERE / "flags_added.txt").read_text(encoding="utf-8").splitlines()
    found = list[str]()
    for name, cls in CLASSES.items():
        theirs = {SPELLED_DIFFERENTLY.get(flag, flag) for flag, _, _ in incumbent(name)}
        found += [f"{name} {leaf}" for leaf in leaves(cls) if leaf not in theirs]
    assert found == [line for line in listed if not line.startswith("#")]


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_every_flag_is_described(cls: type):
    assert [name for name, leaf in leaves(cls).items() if len(docstring(leaf)) < 5] == []


def test_tables_name_flags_that_exist():
    known = {name for cls in ALL for name in leaves(cls)}
    assert set(REFUSED) - known == set()
    assert set(EXPLAINED) - known == set()


def test_the_documentation_is_current():
    spec = importlib.util.spec_from_file_location("gen_flags", ROOT / "tools" / "gen_flags.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = "\n".join([module.HEAD, *module._sections()])
    assert (ROOT / "docs" / "flags.md").read_text(encoding="utf-8") == text

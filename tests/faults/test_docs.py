"""Faults of the documentation: commands that do not parse, links to nowhere, unproved claims."""

import ast
import itertools
import re
import shlex
import tomllib
from functools import cache

import pytest

from quartet import cli, config
from quartet.config.load import from_yaml, load
from quartet.config.support import REFUSED
from quartet.errors import ConfigError
from tests.faults.sources import ROOT

PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/**/*.md")]
    if path.name != "flags.md"
)
CLASSES = {
    "train": {"ppo": "PpoConfig", "sft": "SftConfig", "rm": "RmConfig", "dpo": "DpoConfig"},
    "serve": {
        "rollout": "RolloutServeConfig",
        "reward": "RewardServeConfig",
        "ref": "RefServeConfig",
        "learner": "LearnerServeConfig",
    },
}


def commands():
    """(page, words) of each `quartet train` and `quartet serve` in a code block."""
    for page in PAGES:
        for block in re.findall(
            r"^```\w*\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S
        ):
            for line in block.replace("\\\n", " ").splitlines():
                match = re.search(r"\bquartet (train|serve) (ppo|sft|rm|dpo|\w+) (-.*)", line)
                if match:
                    yield page.name, [match[1], match[2], *shlex.split(match[3], comments=True)]


@pytest.mark.parametrize(("page", "words"), commands())
def test_fault_70_every_command_in_the_docs_parses(page, words):
    command, name, *flags = words
    flags = [word for word in flags if word not in ("...", "&", "--dry-run")]
    # A file of settings is read by the tests of recipes; here it is about names of flags.
    while "--config" in flags:
        place = flags.index("--config")
        del flags[place : place + 2]
    load(getattr(config, CLASSES[command][name]), flags, environ={})


RECIPES = sorted(ROOT.glob("recipes/**/*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: "-".join(path.parts[-2:]))
def test_fault_70_every_recipe_parses(recipe):
    """It is a configuration of one of the commands."""
    refusals = []
    for cls in (name for names in CLASSES.values() for name in names.values()):
        try:
            from_yaml(getattr(config, cls), recipe.read_text(encoding="utf-8"))
            return
        except ConfigError as error:
            refusals.append(f"{cls}: {error}")
    pytest.fail("\n".join(refusals))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_fault_74_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    missing = [
        target for target in targets if "://" not in target and not (page.parent / target).exists()
    ]
    assert missing == []


def test_fault_74_every_command_has_its_flags_in_the_docs():
    text = (ROOT / "docs/flags.md").read_text(encoding="utf-8")
    for command, names in CLASSES.items():
        for name in names:
            assert f"\n## quartet {command} {name}\n" in text
    assert "docs/flags.md" in cli.USAGE


def test_fault_75_every_dependency_has_a_reason_and_none_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    reasons = (ROOT / "docs/dependencies.md").read_text(encoding="utf-8")
    for requirement in itertools.chain(*groups):
        name = re.match(r"[\w-]+", requirement)[0]
        if name == project["name"]:
            continue
        assert re.search(rf"\| [^|]*\b{re.escape(name)}\b[^|]* \|", reasons), name
        assert "==" not in requirement


# The list of faults itself.

TEST = re.compile(r"(tests/[\w/]+\.py)::(\w+)")
ROW = re.compile(r"^\| (\d+) \|(.*)\|(.*)\|(.*)\|$", re.M)


@cache
def rows():
    """Number -> (fault, behaviour, proof) of docs/faults.md."""
    text = (ROOT / "docs/faults.md").read_text(encoding="utf-8")
    return {int(n): (fault, ours, proof) for n, fault, ours, proof in ROW.findall(text)}


@cache
def names_in(path):
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, functions)}


def test_the_list_names_every_fault_once():
    assert list(rows()) == list(range(1, 81))


def test_every_test_of_the_list_exists():
    named = TEST.findall((ROOT / "docs/faults.md").read_text(encoding="utf-8"))
    assert len(named) > 80
    assert [f"{path}::{name}" for path, name in named if name not in names_in(path)] == []


def test_every_row_has_a_test_or_a_refused_flag():
    """A fault of a part that is not here is no fault, as long as nobody can ask for that part."""
    for number, (_, ours, proof) in rows().items():
        flags = re.findall(r"`--([\w.]+)` is refused", proof)
        assert TEST.search(proof) or (flags and "not in this release" in ours), number
        assert [flag for flag in flags if flag not in REFUSED] == [], number


def test_every_test_named_after_a_fault_is_in_its_row():
    for file in sorted((ROOT / "tests/faults").glob("test_*.py")):
        path = str(file.relative_to(ROOT))
        for name in names_in(path):
            if match := re.match(r"test_fault_(\d+)_", name):
                assert f"{path}::{name}" in rows()[int(match[1])][2], name

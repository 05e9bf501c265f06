"""The product's own source files, as text and as syntax trees."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def trees():
    """(path from the root, tree) of every source file that was written by hand."""
    files = sorted([*ROOT.glob("src/**/*.py"), *ROOT.glob("services/**/*.py")])
    return [
        (str(file.relative_to(ROOT)), ast.parse(file.read_text(encoding="utf-8")))
        for file in files
        if "/quartet/api/" not in str(file)
    ]


def calls():
    """(path, line, dotted name of what is called, call) of every call."""
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield path, node.lineno, ast.unparse(node.func), node


def imported():
    """(path, module) of every import."""
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from ((path, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield path, node.module

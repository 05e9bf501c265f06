"""The contract is linted, and the generated code is that of the contract."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_buf_lint() -> None:
    buf = Path(sysconfig.get_path("scripts")) / "buf"
    result = subprocess.run([buf, "lint"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_generated_code_is_fresh() -> None:
    command = [sys.executable, "tools/gen_protos.py", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_next_ids_are_true() -> None:
    """`// Next ID: n.` above a message is one more than its highest field number."""
    wrong = []
    for path in sorted((ROOT / "protos").rglob("*.proto")):
        lines = path.read_text().splitlines()
        for i, line in enumerate(lines):
            if not line.startswith("// Next ID: "):
                continue
            told = int(line.removeprefix("// Next ID: ").rstrip("."))
            end = next(j for j in range(i, len(lines)) if lines[j] == "}")
            numbers = [
                int(text.split("=")[1].strip(" ;").split(" ")[0])
                for text in lines[i + 2 : end]
                if "=" in text and not text.strip().startswith("//")
            ]
            if told != max(numbers) + 1:
                wrong.append(f"{path.name}: {lines[i + 1]} next {told}, has {max(numbers)}")
    assert wrong == []

"""Every method of docs/numerics.md is a command line that this release takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quartet.config import PpoConfig
from quartet.config.load import load
from quartet.config.support import unsupported
from quartet.config.validate import problems

DOC = (Path(__file__).parents[2] / "docs" / "numerics.md").read_text(encoding="utf-8")
BASE = (
    "--actor.model_name_or_path m --data.prompt_dataset d --reward.remote_url f.py "
    "--rollout.n_samples_per_prompt 4 --rollout.max_new_tokens 8192 --data.max_len 16384"
)


def methods() -> list[tuple[str, str]]:
    section = DOC.split("## Methods by name")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]*`[^|]*) \|$", section, re.MULTILINE)
    # The first code of a row is whole; others are said to replace a value.
    return [(name, re.findall(r"`([^`]+)`", text)[0]) for name, text in rows]


@pytest.mark.parametrize(("name", "flags"), methods(), ids=[name for name, _ in methods()])
def test_a_method_is_its_flags(name: str, flags: str):
    line = f"{BASE} " + re.sub(r"(^| )A\.", r"\1--algo.advantage.", flags)
    config = load(PpoConfig, line.split(), environ={}).config
    assert [str(problem) for problem in problems(config)] == []
    assert [str(refusal) for refusal in unsupported(config)] == []


def test_there_are_as_many_as_the_table_has():
    assert len(methods()) >= 13

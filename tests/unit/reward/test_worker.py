"""What a worker makes of what reward functions return, and of files."""

import json
import sys
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from quartet_reward.worker import load_reward_func

from quartet.workers.child import plain


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor([1.0, 0.5]), [1.0, 0.5]),
        (torch.tensor([[1.0], [0.5]]), [[1.0], [0.5]]),
        (torch.tensor(2.0, requires_grad=True), 2.0),
        (torch.tensor([1.5], dtype=torch.bfloat16), [1.5]),
        (torch.tensor([True, False]), [True, False]),
        ([torch.tensor(1.0), 2], [1.0, 2]),
        (np.float32(0.5), 0.5),
        (np.array([1, 2]), [1, 2]),
        (Fraction(1, 4), 0.25),
        (Decimal("0.5"), 0.5),
        ((1, None, "x"), [1, None, "x"]),
        ({"a": {1: np.int64(2)}}, {"a": {"1": 2}}),
        (object(), "<object>"),
        ({1.5}, "<set>"),
    ],
    ids=repr,
)
def test_plain_values(value, expected):
    assert plain(value) == expected
    assert json.loads(json.dumps(plain(value))) == expected


@pytest.fixture
def clean_modules(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


def load(path, text):
    path.write_text(text)
    return load_reward_func(path, text)


FUNCTION = "def reward_func(queries, prompts, labels): return {'rewards': 1}\n"


@pytest.mark.usefixtures("clean_modules")
def test_a_file_may_use_its_name_and_its_place(tmp_path):
    text = f"import dataclasses\nHERE, NAME = __file__, __name__\n{FUNCTION}"
    function = load(tmp_path / "my_rewards.py", text)
    assert function.__globals__["HERE"] == str(tmp_path / "my_rewards.py")
    assert sys.modules["my_rewards"].NAME == "my_rewards"


@pytest.mark.usefixtures("clean_modules")
@pytest.mark.parametrize("name", ["json", "asyncio", "antigravity"])
def test_a_file_named_as_the_standard_library_hides_nothing(tmp_path, name):
    before = sys.modules.get(name)
    load(tmp_path / f"{name}.py", FUNCTION)
    assert sys.modules.get(name) is before
    assert f"quartet_user_{name}" in sys.modules

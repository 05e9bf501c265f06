"""The reward function that is shipped as an example."""

import importlib.util
from pathlib import Path

import pytest
from quartet_reward.answer import read_answer

PATH = Path(__file__).parents[3] / "examples" / "math_reward_func.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("math_reward_func", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        (r"so it is \boxed{42}.", "42", 1.0),
        (r"\boxed{\frac{3}{4}}", "0.75", 1.0),
        (r"\boxed{1} no, \boxed{2}", "2", 1.0),
        (r"\boxed{1,000}", 1000, 1.0),
        (r"\boxed{x + 1}", "x+1", 1.0),
        (r"\boxed{41}", "42", 0.0),
        ("3 + 4 = 7.", "7", 1.0),
        ("3 + 4 = 8.", "7", 0.0),
        ("no idea", "7", 0.0),
        (r"\boxed{unclosed", "7", 0.0),
        (r"\boxed{1/0}", "7", 0.0),
    ],
)
def test_rewards(example, response, label, reward):
    prompt = "What is it? 7 42 "
    answer = example.reward_func([prompt + response], [prompt], [label])
    [outcome] = read_answer(answer, 1)
    assert outcome.reward == reward
    assert outcome.extra_logs["math_accuracy"] == reward

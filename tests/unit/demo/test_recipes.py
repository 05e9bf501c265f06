"""The recipes load, their reward is right, and their held-out data is held out."""

import importlib.util
import sys
from pathlib import Path

import pytest

from quartet.config import PpoConfig
from quartet.config.load import load
from quartet.config.validate import validate

RECIPES = Path(__file__).parents[3] / "recipes"


@pytest.fixture
def recipe(monkeypatch):
    """Import a script of the recipes folder."""

    def load_module(name):
        monkeypatch.syspath_prepend(str(RECIPES))
        spec = importlib.util.spec_from_file_location(name, RECIPES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load_module


def test_smollm2_is_a_valid_configuration(monkeypatch):
    monkeypatch.chdir(RECIPES.parent)
    config = load(PpoConfig, ["--config", str(RECIPES / "smollm2-135m.yaml")], environ={}).config
    validate(config)
    assert config.algo.advantage.estimator == "group_norm"
    assert Path(config.reward.remote_url).is_file()
    assert config.rollout.batch_size * config.rollout.n_samples_per_prompt == 48


@pytest.mark.parametrize(
    ("completion", "label", "reward"),
    [
        ("3 + 4 = 7", "7", 1.0),
        ("The answer is 7.", "7", 1.0),
        ("7.0", "7", 1.0),
        ("7 or 8", "7", 0.0),
        ("-7", "7", 0.0),
        ("seven", "7", 0.0),
        ("", "7", 0.0),
    ],
)
def test_reward_is_the_last_number(recipe, completion, label, reward):
    reward_func = recipe("arithmetic_reward").reward_func
    prompt = "What is 3 + 4?"
    result = reward_func([prompt + completion], [prompt], [label])
    assert result["rewards"] == result["scores"] == [reward]
    assert result["extra_logs"] == {"accuracy": [reward]}


def test_held_out_sums_are_not_in_training(recipe):
    pytest.importorskip("reasoning_gym")
    train, held_out = recipe("arithmetic_data").split()
    assert len(held_out) == len(set(held_out)) == 20
    assert len(train) == 1024
    assert not set(train) & set(held_out)
    for question, answer in held_out:
        left, right = question.removesuffix(" =").split(": ")[1].split(" + ")
        assert int(left) + int(right) == int(answer) <= 18


def test_results_page(recipe, tmp_path):
    results = recipe("arithmetic_results")
    wrong = [results.Answer(f"q{i}", "7", "8 <|x|>", False) for i in range(40)]
    right = [results.Answer(f"q{i}", "7", "7", True) for i in range(40)]
    metrics = [
        {"global_step": i, "kind": "train", "reward": 0.1 * i, "kl": 0.01, "response_length": 9.0}
        for i in range(1, 4)
    ]
    page = results.markdown(metrics, {"of training": (wrong, right), "held out": (wrong, right)})
    assert "| held out | 40 | 0.0% | 100.0% |" in page
    assert "first 3 steps 0.200" in page
    assert page.count("* before, wrong") == 5
    results.plot(metrics, tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_text().count("axes_") >= 3

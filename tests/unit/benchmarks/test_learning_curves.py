"""The learning curves of all estimators: numbers, page, and one short run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.curves import Curve, draw, page, smoothed, table
from benchmarks.grpc_share import make_models, write_prompts
from benchmarks.learning_curves import ESTIMATORS, main
from quartet.algorithms.advantages import ESTIMATORS as ALL_ESTIMATORS

BEFORE = {"lexicon": 0.0, "reward": 0.0, "kl": 0.0, "entropy": 2.0, "length": 8.0}
LEARNED = Curve(
    estimator="rloo",
    seed=1,
    settings={"train.max_steps": "4", "rollout.batch_size": "2"},
    reward=[0.0, 0.1, 0.2, 0.9],
    lexicon=[0.0, 0.2, 0.3, 0.6],
    before=BEFORE,
    after=BEFORE | {"lexicon": 0.5, "reward": 1.0, "kl": 0.1},
)


def test_every_estimator_has_its_curve() -> None:
    assert list(ESTIMATORS) == list(ALL_ESTIMATORS)


def test_a_run_learned_when_all_that_is_measured_rose() -> None:
    assert LEARNED.problems() == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"reward": [1.0, 0.5, 0.4, 0.1]}, "reward in training"),
        ({"lexicon": [0.3, 0.3, 0.3, 0.3]}, "lexicon score in training"),
        ({"after": dict(LEARNED.after) | {"lexicon": -0.1}}, "lexicon afterwards"),
        ({"after": dict(LEARNED.after) | {"reward": 0.0}}, "reward afterwards"),
    ],
)
def test_what_did_not_rise_is_named(change: dict[str, object], named: str) -> None:
    (problem,) = dataclasses.replace(LEARNED, **change).problems()
    assert problem.startswith(named)


def test_a_curve_is_read_as_it_was_written(tmp_path: Path) -> None:
    LEARNED.save(tmp_path / "one.json")
    assert Curve.load(tmp_path / "one.json") == LEARNED


def test_table_page_and_figure_speak_of_all_runs(tmp_path: Path) -> None:
    other = dataclasses.replace(LEARNED, seed=2, after=BEFORE)
    row = table([LEARNED, other]).splitlines()[-1]
    assert row.startswith("| rloo | 2 | ")
    assert row.endswith("| 1 of 2 |")
    text = page([LEARNED, other], command="make it", common={"train.max_steps": "4"})
    assert "* rloo: `--rollout.batch_size 2`" in text
    draw([LEARNED, other], tmp_path / "curves.svg")
    assert "rloo" in (tmp_path / "curves.svg").read_text()


def test_smoothing_takes_the_neighbours() -> None:
    assert smoothed([0.0, 3.0, 6.0]) == [1.5, 3.0, 4.5]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_one_estimator_for_two_steps(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    task = tmp_path / "task"
    policy, reward = make_models(tmp_path / "made")
    (task / "models").mkdir(parents=True)
    (task / "data").mkdir()
    policy.rename(task / "models" / "sft")
    reward.rename(task / "models" / "rm")
    write_prompts(task / "data" / "prompts.jsonl")
    prompts = (task / "data" / "prompts.jsonl").read_text().splitlines()
    (task / "data" / "held_out_prompts.jsonl").write_text("\n".join(prompts[:8]) + "\n")
    words = ["--task", str(task), "--folder", str(tmp_path / "runs"), "--steps", "2"]
    words += ["--output", str(tmp_path / "results")]
    words += ["--estimators", "dr_grpo", "--seeds", "5"]
    # Two steps are start and end at once, so nothing can have risen between them.
    assert main(words) == 1
    assert "DID NOT LEARN: dr_grpo, seed 5" in capfd.readouterr().out
    (numbers,) = json.loads((tmp_path / "results" / "numbers.json").read_text())
    assert (numbers["estimator"], numbers["seed"]) == ("dr_grpo", 5)
    assert len(numbers["reward"]) == len(numbers["lexicon"]) == 2
    assert numbers["after"]["kl"] > numbers["before"]["kl"] == 0.0
    main(words)
    assert "dr_grpo-5: done before" in capfd.readouterr().out

"""The benchmark of a training step: its batch, its table, and one small run of all contenders."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from benchmarks.learner.__main__ import ALL, CONTENDERS, main
from benchmarks.learner.batch import Batch, cut_padded, make_batch
from benchmarks.learner.report import disagreements, report
from benchmarks.learner.worker import Measured

PLAIN = Measured(
    contender="plain",
    loss=2.0,
    grad_norm=1.0,
    tokens_computed=150,
    seconds=4.0,
    cpu_seconds=2.0,
    before_mib=100.0,
    peak_mib=150.0,
)


@pytest.fixture
def batch() -> Batch:
    return make_batch(5000, longest=400, vocabulary=50)


def test_a_batch_has_a_long_tail_within_its_bounds(batch: Batch) -> None:
    assert batch.lengths.sum() >= 5000
    assert batch.lengths.max() == 400
    assert batch.lengths.max() > 2 * np.median(batch.lengths)
    assert not any(mask[0] for _, mask in batch.rows())
    assert all(mask.any() for _, mask in batch.rows())
    assert batch.token_ids.max() < 50


def test_the_same_seed_gives_the_same_batch(batch: Batch) -> None:
    again = make_batch(5000, longest=400, vocabulary=50)
    assert np.array_equal(batch.token_ids, again.token_ids)


@pytest.mark.parametrize("ordered", [True, False])
def test_padded_micro_batches_hold_everything_once_within_the_budget(
    batch: Batch, ordered: bool
) -> None:
    cut = cut_padded(batch.lengths.tolist(), 600, ordered=ordered)
    assert sorted(i for part in cut for i in part) == list(range(len(batch.lengths)))
    assert all(max(batch.lengths[part]) * len(part) <= 600 for part in cut)


def test_order_by_length_needs_less_padding(batch: Batch) -> None:
    def computed(ordered: bool) -> int:
        cut = cut_padded(batch.lengths.tolist(), 600, ordered=ordered)
        return sum(int(max(batch.lengths[part])) * len(part) for part in cut)

    assert computed(ordered=True) < computed(ordered=False)


def test_the_table_has_ratios_to_the_plain_loop() -> None:
    faster = dataclasses.replace(PLAIN, contender="quartet", cpu_seconds=1.0, seconds=8.0)
    slower = dataclasses.replace(faster, cpu_seconds=3.0)
    row = next(x for x in report([PLAIN, faster, slower], 100).splitlines() if "quartet" in x)
    # padded; CPU best and median; clock best and median; tokens per CPU second; memory
    assert row.split()[1:] == ["1.50", "2.00", "1.00", "0.50", "0.50", "100.0", "150", "50"]


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_other_numbers_than_the_plain_loop_has_are_named(name: str) -> None:
    close = dataclasses.replace(PLAIN, contender="close", **{name: getattr(PLAIN, name) * 1.00001})
    wrong = dataclasses.replace(PLAIN, contender="wrong", **{name: getattr(PLAIN, name) * 1.001})
    assert [line.split(":")[0] for line in disagreements([PLAIN, close, wrong])] == ["wrong"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_all_contenders_take_the_same_step(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whoever starts the benchmark may be one of several ranks itself.
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert main(["--quick"]) == 0
    out = capsys.readouterr().out
    assert "losses and gradients agree" in out
    for contender in CONTENDERS:
        assert re.search(rf"^{contender} +\d", out, re.MULTILINE), contender


def test_the_names_are_those_of_the_workers() -> None:
    from benchmarks.learner.contenders import CONTENDERS as FUNCTIONS

    assert tuple(FUNCTIONS) == ALL
    assert set(CONTENDERS) < set(ALL)


def test_a_missing_model_is_one_clear_line(
    capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert main(["--model", str(tmp_path_factory.mktemp("nothing"))]) == 1
    assert "make setup-recipes" in capsys.readouterr().err

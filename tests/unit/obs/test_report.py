"""Reports are one self-contained file."""

import pytest

from quartet.obs.report import curve, curves, main, page, read_metrics, svg, table

ROWS = [
    {"global_step": 1, "kind": "train", "reward": 0.5, "kl": None},
    {"global_step": 1, "kind": "eval", "reward": 9.0},
    {"global_step": 2, "kind": "train", "reward": 0.7, "kl": 0.1},
]


def test_curves_take_training_rows_with_numbers():
    one = curve(ROWS, "reward")
    assert (one.steps, one.values) == ([1, 2], [0.5, 0.7])
    assert curve(ROWS, "kl").steps == [2]
    assert [c.title for c in curves(ROWS)] == ["Reward"]


def test_the_broken_last_line_of_a_killed_run_is_left_out(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"global_step": 1}\n{"global_st')
    assert read_metrics(file) == [{"global_step": 1}]


def test_plots_are_the_same_for_the_same_numbers():
    one = curve(ROWS, "reward", "Reward")
    assert svg(one) == svg(one)
    assert svg(one).startswith("<svg")
    assert ">Reward<" in svg(one)


def test_text_is_escaped():
    assert "&lt;b&gt;" in table(["<b>"], [])
    assert "<td>&lt;script&gt;</td>" in table(["x"], [["<script>"]])
    assert "&lt;i&gt;" in page("<i>", [])


def test_command(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "no metrics.jsonl" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text(
        '{"global_step": 1, "reward": 1.0}\n{"global_step": 2, "reward": 2.0}\n'
    )
    (tmp_path / "samples.jsonl").write_text(
        '{"global_step": 2, "prompt": "p", "completion": "c", "reward": null}\n'
    )
    assert main([str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text()
    assert "Samples of step 2" in text
    assert "<td>c</td>" in text
    assert text.count("<svg") == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_not_plotted(value):
    assert curve([{"global_step": 1, "reward": value}], "reward").steps == []

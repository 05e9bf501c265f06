"""The driver: its commands parse, it cleans up after itself alone, and it tells failure."""

import sys
from dataclasses import replace

import pytest

from quartet.cli import main as quartet
from quartet.demo.__main__ import RECIPES, Demo, clear, main
from quartet.demo.measure import Measurement, Sample, measure
from quartet.demo.outcome import gold_curve, summary, verdict, write_report
from quartet.demo.task import write_task
from quartet.testing.tiny import make_tiny_model, train_tokenizer

BEFORE = Measurement(
    reward=0.1,
    gold=0.0,
    kl=0.0,
    entropy=1.8,
    length=8.5,
    samples=(Sample(prompt="the <cat>", completion=" was sad .", reward=-1.0, gold=-0.5),),
)
AFTER = replace(BEFORE, reward=1.1, gold=0.5, kl=0.2)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("task"))


@pytest.mark.parametrize("stage", ["sft", "rm", "ppo"])
def test_every_stage_is_a_valid_command(stage, files, tmp_path, capsys, monkeypatch):
    """The recipes and the driver's flags, checked by the command line itself."""
    demo = Demo(folder=tmp_path / "run", engine="transformers", recipes=RECIPES)
    for name in ("base", "sft", "rm"):
        make_tiny_model(demo.model(name), tokenizer=train_tokenizer())
    flags = dict(demo.stages(files))[stage]
    commands = []
    monkeypatch.setattr("subprocess.Popen", lambda command: commands.append(command) or _Finished())
    assert demo.train(stage, flags) == 0
    assert commands[0][:4] == [sys.executable, "-m", "quartet", "train"]
    assert "$ quartet train" in capsys.readouterr().out
    assert quartet([*demo.commands[stage][1:], "--dry-run"]) == 0
    assert "keeps it from running" in capsys.readouterr().out


class _Finished:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def wait(self):
        return 0


def test_a_failed_stage_ends_the_demo_with_its_code(files, tmp_path, monkeypatch, capsys):
    demo = Demo(folder=tmp_path / "run", engine="transformers", recipes=RECIPES)
    tried = []
    monkeypatch.setattr(Demo, "prepare", lambda self: files)
    monkeypatch.setattr(Demo, "train", lambda self, name, flags: tried.append(name) or 3)
    assert demo.run() == 3
    assert tried == ["sft"]
    assert "the stage sft ended with exit code 3" in capsys.readouterr().out


def test_verdicts():
    assert verdict(BEFORE, AFTER) == []
    assert "reward did not rise" in verdict(BEFORE, replace(AFTER, reward=0.1))[0]
    assert "gold metric fell" in verdict(BEFORE, replace(AFTER, gold=-0.1))[0]


def test_summary_shows_both_sides():
    text = summary(BEFORE, AFTER, seconds={"ppo": 61.2})
    assert "0.100     1.100" in text
    assert "the <cat> was sad .  [-0.50]" in text
    assert "ppo 61 s" in text


def test_report_has_plots_numbers_and_commands(tmp_path):
    run = tmp_path / "ppo"
    run.mkdir()
    rows = [f'{{"global_step": {i}, "kind": "train", "reward": {i}}}\n' for i in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(rows))
    sample = '{"global_step": %d, "completion": "good"}\n'
    (run / "samples.jsonl").write_text(sample % 1 + sample % 2)
    report = tmp_path / "report.html"
    commands = {"ppo": ["quartet", "train", "ppo"]}
    write_report(report, runs={"ppo": run}, commands=commands, before=BEFORE, after=AFTER)
    text = report.read_text()
    assert text.count("<svg") == 2
    assert "Gold metric" in text
    assert "the &lt;cat&gt;" in text
    assert "quartet train ppo" in text
    assert gold_curve(run / "samples.jsonl").values == pytest.approx([0.4404, 0.4404])


def test_old_runs_are_cleared_and_other_folders_are_not_touched(tmp_path, capsys):
    clear(tmp_path / "demo")
    (tmp_path / "demo" / "sft").mkdir()
    (tmp_path / "demo" / "notes.txt").touch()
    (tmp_path / "demo" / "report.html").touch()
    assert capsys.readouterr().out == ""
    clear(tmp_path / "demo")
    assert "takes the place of the last one" in capsys.readouterr().out
    assert not (tmp_path / "demo" / "report.html").exists()
    assert not (tmp_path / "demo" / "sft").exists()
    assert (tmp_path / "demo" / "notes.txt").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "sft").mkdir()
    assert main(["--run-dir", str(tmp_path / "mine")]) == 2
    assert "not the demo's" in capsys.readouterr().err
    assert (tmp_path / "mine" / "sft").exists()


def test_missing_recipes_are_named(tmp_path, capsys):
    assert main(["--recipes", str(tmp_path)]) == 2
    assert "no recipes" in capsys.readouterr().err


def test_a_model_measured_against_itself(tiny_model_dir, tiny_reward_model_dir):
    result = measure(
        tiny_model_dir,
        reference=tiny_model_dir,
        reward_model=tiny_reward_model_dir,
        prompts=["the cat", "a longer prompt about the rain"],
    )
    assert result.kl == pytest.approx(0.0, abs=1e-6)
    assert 0 < result.entropy < 6.0
    assert len(result.samples) == 2
    assert result.reward == pytest.approx(sum(s.reward for s in result.samples) / 2)
    assert 1 <= result.length <= 24


def test_padding_does_not_change_a_reward(tiny_model_dir, tiny_reward_model_dir):
    """The score of a sequence in a padded batch is the one that it has alone."""
    import torch
    from transformers import AutoModelForSequenceClassification

    from quartet.demo.measure import _rewards

    judge = AutoModelForSequenceClassification.from_pretrained(tiny_reward_model_dir).eval()
    tokens = torch.tensor([[0, 0, 40, 41, 2, 0], [50, 51, 52, 53, 54, 2]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 0], [1] * 6]).bool()
    with torch.no_grad():
        batch = _rewards(judge, tokens, mask, (mask.cumsum(1) - 1).clamp(min=0))
        alone = torch.ones(1, 3).bool()
        single = _rewards(judge, tokens[:1, 2:5], alone, torch.arange(3)[None])
    assert batch[0] == pytest.approx(single[0], abs=1e-5)

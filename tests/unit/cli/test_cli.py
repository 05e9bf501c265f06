from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest

from quartet import __version__, cli
from quartet.config import PpoConfig, RefServeConfig
from quartet.errors import ConfigError, FatalError

ROOT = Path(__file__).parents[3]
COMMANDS = [
    *(["train", method] for method in ("ppo", "sft", "rm", "dpo")),
    *(["serve", room] for room in ("rollout", "reward", "ref", "learner")),
]
HEAVY = ("torch", "transformers", "deepspeed", "datasets", "vllm", "tyro", "pandas", "grpc")
PPO = [
    *("--actor.model_name_or_path", "org/policy", "--reward.model_name_or_path", "org/reward"),
    *("--data.prompt_dataset", "org/prompts", "--ds.param_dtype", "fp32"),
]


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "quartet", *args], capture_output=True, text=True, timeout=60
    )


def worker(monkeypatch: pytest.MonkeyPatch, module: str, main: object) -> None:
    """Put a module with this `main` in place of a room or method."""
    found = types.ModuleType(module)
    found.__dict__["main"] = main
    monkeypatch.setitem(sys.modules, module, found)
    monkeypatch.setattr(cli, "find_spec", lambda name: object())


def test_usage(capsys: pytest.CaptureFixture[str]):
    assert cli.main([]) == 0
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    for command in ("train ppo|sft|rm|dpo", "serve rollout|reward|ref|learner", "probe", "tools"):
        assert command in out
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"quartet {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help(command: list[str], capsys: pytest.CaptureFixture[str]):
    assert cli.main([*command, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"usage: quartet {' '.join(command)} [flags]" in out
    assert "--ds.param_dtype" in out


def test_help_and_plans_import_nothing_heavy():
    """That is what makes them quick; a clock would measure the machine."""
    script = (
        "import sys; from quartet.cli import main\n"
        f"for command in {COMMANDS!r}: assert main([*command, '--help']) == 0\n"
        f"heavy = sorted(set({HEAVY!r}) & set(sys.modules))\n"
        "assert not heavy, heavy\n"
        f"assert main(['train', 'ppo', *{PPO!r}, '--dry-run']) == 0\n"
        "heavy = sorted(set(['torch', 'transformers', 'deepspeed', 'datasets', 'vllm', 'grpc']) "
        "& set(sys.modules))\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("flag", ["--dry-run", "--dry_run"])
def test_dry_run(flag: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["train", "ppo", *PPO, flag]) == 0
    assert "Plan of quartet train ppo" in capsys.readouterr().out
    assert cli.main(["serve", "ref", "--ref.model_name_or_path", "org/lm", flag]) == 0
    assert "Plan of quartet serve ref" in capsys.readouterr().out


def test_the_seeds_line(capsys: pytest.CaptureFixture[str]):
    line = (ROOT / "tests/golden/config/seed_line.txt").read_text(encoding="utf-8").split()
    assert cli.main(["train", "ppo", *line, "--dry-run"]) == 0
    assert "4 engines x TP 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["frobnicate"], ["no such command", "train, serve"]),
        (["train", "grpo"], ["no such command", "ppo, sft, rm, dpo"]),
        (["serve", "critic"], ["no such command", "learner"]),
        (["tools", "x"], ["no such command", "gguf-to-hf"]),
        (["conformance", "x", "y:1"], ["no such command", "reward"]),
        (["train", "ppo"], ["--actor.model_name_or_path", "no model"]),
        (["train", "ppo", "--rollout.temp", "1"], ["did you mean --rollout.temperature?"]),
        (["train", "ppo", *PPO, "--rollout.temperature", "0"], ["--rollout.temperature 0.0"]),
        (["train", "ppo", *PPO, "--use_ms"], ["--use_ms", "ModelScope"]),
        (["train", "ppo", *PPO, "--reward.model_name_or_path", "./gone"], ["no such folder"]),
        (["train", "ppo", *PPO, "--config", "gone.yaml"], ["gone.yaml"]),
        (["serve", "rollout"], ["--rollout.model_name_or_path"]),
    ],
)
def test_a_wrong_line_is_one_line_and_exit_code_2(
    args: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
):
    assert cli.main(args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    for word in words:
        assert word in captured.err


def test_commands_without_a_name_show_how(capsys: pytest.CaptureFixture[str]):
    for command in ("train", "serve", "tools", "conformance"):
        assert cli.main([command]) == 2
        assert cli.main([command, "--help"]) == 0
    assert "quartet train ppo|sft|rm|dpo [flags]" in capsys.readouterr().out


def test_the_worker_gets_the_configuration(monkeypatch: pytest.MonkeyPatch):
    seen: list[object] = []
    worker(monkeypatch, "quartet.trainer.ppo", lambda config: seen.append(config) or 7)
    worker(monkeypatch, "quartet_ref.server", lambda config: seen.append(config) or 0)
    assert cli.main(["train", "ppo", *PPO, "--train.seed", "5"]) == 7
    assert cli.main(["serve", "ref", "--ref.model_name_or_path", "org/lm"]) == 0
    trainer, service = seen
    assert isinstance(trainer, PpoConfig)
    assert trainer.train.seed == 5
    assert isinstance(service, RefServeConfig)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("a tokenizer differs", remedy="use one"), 2, "error: a tokenizer differs"),
        (FatalError("the learner died"), 1, "error: the learner died"),
        (KeyboardInterrupt(), 130, "interrupted: stopped"),
    ],
)
def test_failures_of_the_worker(
    error: BaseException,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def fail(config: object) -> int:
        raise error

    worker(monkeypatch, "quartet.trainer.ppo", fail)
    assert cli.main(["train", "ppo", *PPO]) == code
    assert capsys.readouterr().err.startswith(line)


def test_a_method_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    line = ["--model.model_name_or_path", "org/lm", "--data.dataset", "org/pairs"]
    assert cli.main(["train", "dpo", *line]) == 2
    assert "quartet train dpo is not in this release" in capsys.readouterr().err


def test_a_package_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def missing(name: str) -> types.ModuleType:
        if name == "quartet_ref.server":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        return importlib_import(name)

    importlib_import = cli.import_module
    monkeypatch.setattr(cli, "import_module", missing)
    assert cli.main(["serve", "ref", "--ref.model_name_or_path", "org/lm"]) == 2
    assert "needs the package torch (pip install 'quartet-rlhf[ref]')" in capsys.readouterr().err


def test_as_a_module_and_into_a_closed_pipe():
    assert run("--version").stdout == f"quartet {__version__}\n"
    assert run("train", "ppo", "--nonsense").returncode == 2
    piped = subprocess.run(
        f"{sys.executable} -m quartet train ppo --help | head -1",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert piped.stdout == "usage: quartet train ppo [flags]\n"
    assert "Traceback" not in piped.stderr


def test_probe_says_that_nobody_is_there(capfd: pytest.CaptureFixture[str]):
    assert cli.main(["probe", "127.0.0.1:1", "--timeout", "1"]) == 1
    assert "UNAVAILABLE" in capfd.readouterr().out

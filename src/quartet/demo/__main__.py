"""Run the demo: `python -m quartet.demo [--run-dir runs/demo] [--engine transformers]`.

Makes data and a tiny model, then calls the command line three times, as a user would, with the
files of recipes/demo. Exit code 0 when the reward rose and the gold metric did not fall.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from quartet.config.machine import this_machine
from quartet.demo.measure import measure
from quartet.demo.outcome import summary, verdict, write_report
from quartet.demo.task import TaskFiles, read_rows, write_task
from quartet.testing.tiny import TinyShape, make_tiny_model, train_tokenizer

RECIPES = Path(__file__).parents[3] / "recipes" / "demo"
SHAPE = TinyShape(
    hidden=128, layers=2, heads=4, kv_heads=4, intermediate=384, vocab=1024, max_length=64
)
"""About half a million parameters; every word of the task becomes one token."""

REPORT = "report.html"
_MARK = ".quartet-demo"
_OWN_FOLDERS = ("data", "models", "sft", "rm", "ppo")


@dataclass(kw_only=True, slots=True)
class Demo:
    """One run of the demo."""

    folder: Path
    engine: str
    recipes: Path
    engine_python: str | None = None
    """Python of the rollout service; None is this one."""
    commands: dict[str, list[str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def model(self, name: str) -> Path:
        """Folder of a model."""
        return self.folder / "models" / name

    def run(self) -> int:
        """Do everything and return the exit code."""
        with self.timed("data and base model"):
            files = self.prepare()
        for name, flags in self.stages(files):
            with self.timed(name):
                code = self.train(name, flags)
            if code != 0:
                sys.stdout.write(f"\nthe stage {name} ended with exit code {code}\n")
                return code
        return self.judge(files)

    def prepare(self) -> TaskFiles:
        """Write the data, and a model with random weights and a tokenizer trained on that data."""
        clear(self.folder)
        sys.stdout.write("making data, a tokenizer and a model with random weights\n")
        sys.stdout.flush()
        files = write_task(self.folder / "data")
        texts = [row["prompt"] + row["completion"] for row in read_rows(files.sft)]
        tokenizer = train_tokenizer(texts, vocab=SHAPE.vocab, max_length=SHAPE.max_length)
        make_tiny_model(self.model("base"), shape=SHAPE, tokenizer=tokenizer, init_std=0.02)
        return files

    def stages(self, files: TaskFiles) -> Iterator[tuple[str, dict[str, object]]]:
        """The three stages: name, and the flags that the recipe leaves open."""
        yield (
            "sft",
            {
                "model.model_name_or_path": self.model("base"),
                "data.dataset": files.sft,
                "ckpt.output_dir": self.model("sft"),
            },
        )
        yield (
            "rm",
            {
                "model.model_name_or_path": self.model("sft"),
                "data.dataset": files.pairs,
                "eval.dataset": files.held_out_pairs,
                "ckpt.output_dir": self.model("rm"),
            },
        )
        yield (
            "ppo",
            {
                "actor.model_name_or_path": self.model("sft"),
                "critic.model_name_or_path": self.model("rm"),
                "reward.model_name_or_path": self.model("rm"),
                "data.prompt_dataset": files.prompts,
                "ckpt.output_dir": self.model("ppo"),
                "rollout.engine": self.engine,
                **({"rollout.python": self.engine_python} if self.engine_python else {}),
            },
        )

    def train(self, name: str, flags: dict[str, object]) -> int:
        """Call `quartet train NAME`, its output as it comes."""
        command = ["quartet", "train", name, "--config", str(self.recipes / f"{name}.yaml")]
        command += ["--run.dir", str(self.folder)]
        for flag, value in flags.items():
            command += [f"--{flag}", str(value)]
        self.commands[name] = command
        sys.stdout.write(f"\n$ {shlex.join(command)}\n")
        sys.stdout.flush()
        with subprocess.Popen([sys.executable, "-m", *command]) as process:
            try:
                return process.wait()
            except KeyboardInterrupt:
                process.wait()  # the terminal interrupted it too; it stops its services
                raise

    def judge(self, files: TaskFiles) -> int:
        """Measure the models before and after PPO, show and write what came out."""
        prompts = [row["prompt"] for row in read_rows(files.held_out_prompts)]
        with self.timed("measuring"):
            before, after = (
                measure(
                    self.model(name),
                    reference=self.model("sft"),
                    reward_model=self.model("rm"),
                    prompts=prompts,
                )
                for name in ("sft", "ppo")
            )
        report = self.folder / REPORT
        write_report(
            report,
            runs={name: self.folder / name for name in self.commands},
            commands=self.commands,
            before=before,
            after=after,
        )
        sys.stdout.write(
            f"\n{summary(before, after, seconds=self.seconds)}\nreport: {report}\n"
            f"models: {self.folder / 'models'}; each command above also runs by itself\n"
        )
        problems = verdict(before, after)
        sys.stdout.write("".join(f"FAILED: {problem}\n" for problem in problems))
        return 1 if problems else 0

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Note how long something takes."""
        began = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - began


def clear(folder: Path) -> None:
    """Remove what an earlier demo left in `folder`, and nothing that is not the demo's.

    Raises:
        FileExistsError: the folder holds something else.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / _MARK).exists():
        raise FileExistsError(f"{folder} holds something that is not the demo's")
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / _MARK).exists():
        sys.stdout.write(f"{folder}: this demo takes the place of the last one\n")
    (folder / _MARK).touch()
    (folder / REPORT).unlink(missing_ok=True)  # it tells of models that are about to go
    for name in _OWN_FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)


def _quieten_libraries() -> None:
    """Keep what is said of saving a small file, and of the missing GPU, off the terminal."""
    if this_machine().num_gpus == 0:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m quartet.demo", description=__doc__)
    parser.add_argument(
        "--run-dir",
        type=Path,
        default=Path(os.environ.get("RUN_DIR") or "runs/demo"),
        help="folder of data, models, runs and report (environment: RUN_DIR)",
    )
    parser.add_argument(
        "--engine",
        default=os.environ.get("ENGINE") or "transformers",
        help="rollout engine (environment: ENGINE)",
    )
    parser.add_argument(
        "--engine-python",
        default=os.environ.get("ENGINE_PYTHON") or None,
        help="Python that runs the rollout service (environment: ENGINE_PYTHON)",
    )
    parser.add_argument("--recipes", type=Path, default=RECIPES, help="folder of the YAML files")
    args = parser.parse_args(argv)
    if not (args.recipes / "ppo.yaml").is_file():
        sys.stderr.write(f"error: there are no recipes in {args.recipes}; use --recipes\n")
        return 2
    _quieten_libraries()
    try:
        return Demo(
            folder=args.run_dir,
            engine=args.engine,
            engine_python=args.engine_python,
            recipes=args.recipes,
        ).run()
    except FileExistsError as error:
        sys.stderr.write(f"error: {error}; use --run-dir\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: stopped\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())

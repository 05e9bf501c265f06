"""`python -m benchmarks.learning_curves`: every advantage estimator on the demo's task, by seeds.

Makes the demo's data, SFT model and reward model once, and then runs `quartet train ppo` for each
estimator and seed, all with the same budget. Runs that are finished are not done again, so the
command goes on where it was stopped. Writes a figure, a page and the numbers, and ends with exit
code 1 when a run did not learn.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from threading import Lock

from benchmarks.curves import MEASURED, Curve, draw, page, table
from quartet.data import load_tokenizer
from quartet.demo.__main__ import Demo
from quartet.demo.measure import measure
from quartet.demo.task import read_rows, sentiment
from quartet.obs.report import read_metrics

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "recipes" / "demo"
ESTIMATORS: dict[str, dict[str, str]] = {
    "gae": {},
    "reinforce": {},
    "rloo": {},
    "reinforce_baseline": {},
    "group_norm": {},
    "dr_grpo": {},
    "flash_reinforce": {
        "rollout.batch_size": "256",
        "rollout.n_samples_per_prompt": "1",
        "actor.loss_agg_mode": "seq-mean-token-mean",
        "algo.advantage.is_correction_level": "seq",
        "algo.advantage.is_correction_gating": "binary_kl",
        "algo.advantage.is_correction_threshold": "3e-3",
    },
}
"""Flags of each estimator beside its name. All draw 256 samples a step."""

LOG_LINES = 20

_measuring = Lock()
"""Samples are drawn with the process's one random state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What all runs share."""

    policy: Path
    """Model that PPO begins with, and its reference."""
    reward_model: Path
    prompts: Path
    """JSON lines with the column prompt; for training."""
    held_out: Path
    """The same, for measuring."""

    def flags(self, steps: int) -> dict[str, str]:
        """Flags that are the same in all runs and mean something to readers."""
        return {
            # Enough for the estimator that takes the most prompts a step.
            "train.num_episodes": str(-(-steps * 256 // len(read_rows(self.prompts)))),
            "train.max_steps": str(steps),
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Do what is missing, write the results; returns the exit code."""
    options = _options(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        options.folder.mkdir(parents=True, exist_ok=True)
        task = _task(options)
        curves = list(_run_all(task, options))
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    _write(task, curves, options)
    print(f"\n{table(curves)}\n\nresults: {options.output}")
    wrong = [f"{c.estimator}, seed {c.seed}: {p}" for c in curves for p in c.problems()]
    print("".join(f"DID NOT LEARN: {line}\n" for line in wrong) or "every run learned")
    return 1 if wrong else 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning_curves",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/estimators"), help="of the runs")
    parser.add_argument("--output", type=Path, default=Path("docs/results/estimators"))
    parser.add_argument("--estimators", nargs="+", choices=ESTIMATORS, default=[*ESTIMATORS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=24, help="of PPO in each run (24)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (1)")
    parser.add_argument(
        "--task",
        type=Path,
        help="folder with models/sft, models/rm, data/prompts.jsonl, data/held_out_prompts.jsonl, "
        "as `make demo` leaves it; default: made in FOLDER",
    )
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error("--steps: at least one step")
    return options


def _task(options: argparse.Namespace) -> Task:
    """The models and the data, made if need be."""
    folder = options.task or options.folder / "task"
    task = Task(
        policy=folder / "models" / "sft",
        reward_model=folder / "models" / "rm",
        prompts=folder / "data" / "prompts.jsonl",
        held_out=folder / "data" / "held_out_prompts.jsonl",
    )
    if options.task is None and not (task.reward_model / "config.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        demo = Demo(folder=folder, engine="transformers", recipes=RECIPES)
        for name, flags in demo.stages(demo.prepare()):
            if name != "ppo" and demo.train(name, flags) != 0:
                raise RuntimeError(f"the stage {name} failed; its output is above")
    return task


def _run_all(task: Task, options: argparse.Namespace) -> Iterator[Curve]:
    """Curves by estimator and seed, as they get ready; seeds in turn, so that a part is of use."""
    wanted = [(name, seed) for seed in options.seeds for name in options.estimators]
    with ThreadPoolExecutor(options.jobs) as pool:
        curves = list(pool.map(lambda one: _curve(task, one[0], one[1], options), wanted))
    return iter(sorted(curves, key=lambda c: (options.estimators.index(c.estimator), c.seed)))


def _curve(task: Task, estimator: str, seed: int, options: argparse.Namespace) -> Curve:
    """One run, or what it gave when it was done before with the same settings."""
    name = f"{estimator}-{seed}"
    settings = task.flags(options.steps) | ESTIMATORS[estimator]
    file = options.folder / f"{name}.json"
    if file.is_file():
        found = Curve.load(file)
        if dict(found.settings) == settings:
            print(f"{name}: done before", flush=True)
            return found
    model = options.folder / "models" / name
    shutil.rmtree(options.folder / name, ignore_errors=True)
    _train(task, name, seed, settings | {"algo.advantage.estimator": estimator}, options.folder)
    texts = read_rows(options.folder / name / "samples.jsonl")
    rows = [r for r in read_metrics(options.folder / name / "metrics.jsonl") if "reward" in r]
    curve = Curve(
        estimator=estimator,
        seed=seed,
        settings=settings,
        reward=[row["reward"] for row in rows if row["kind"] == "train"],
        lexicon=_lexicon(texts, str(load_tokenizer(task.policy).eos_token)),
        before=_measured(task.policy, task, seed),
        after=_measured(model, task, seed),
    )
    curve.save(file)
    shutil.rmtree(model)
    print(
        f"{name}: lexicon score {curve.before['lexicon']:.3f} -> {curve.after['lexicon']:.3f}",
        flush=True,
    )
    return curve


def _train(task: Task, name: str, seed: int, settings: Mapping[str, str], folder: Path) -> None:
    """Run `quartet train ppo`; its output goes to FOLDER/NAME.log.

    Raises:
        RuntimeError: it failed; the message has the end of its output.
    """
    flags = {
        "config": str(RECIPES / "ppo.yaml"),
        "actor.model_name_or_path": str(task.policy),
        "reward.model_name_or_path": str(task.reward_model),
        "critic.model_name_or_path": str(task.reward_model),
        "data.prompt_dataset": str(task.prompts),
        "ckpt.output_dir": str(folder / "models" / name),
        "rollout.engine": "transformers",
        "train.seed": str(seed),
        "run.dir": str(folder),
        "run.name": name,
        **settings,
    }
    if settings["algo.advantage.estimator"] != "gae":
        del flags["critic.model_name_or_path"]
    command = [sys.executable, "-m", "quartet", "train", "ppo"]
    command += [word for flag, value in flags.items() for word in (f"--{flag}", value)]
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        code = subprocess.call(
            command, stdout=output, stderr=output, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
    if code != 0:
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        raise RuntimeError("\n".join([f"{name} ended with exit code {code}:", *lines]))


def _lexicon(texts: Sequence[Mapping[str, object]], end_token: str) -> list[float]:
    """Mean lexicon score of each step's texts."""
    scores: dict[int, list[float]] = {}
    for row in texts:
        text = str(row["completion"]).removesuffix(end_token)
        scores.setdefault(int(str(row["global_step"])), []).append(sentiment(text))
    return [fmean(scores[step]) for step in sorted(scores)]


def _measured(policy: Path, task: Task, seed: int) -> dict[str, float]:
    prompts = [row["prompt"] for row in read_rows(task.held_out)]
    with _measuring:
        found = measure(
            policy,
            reference=task.policy,
            reward_model=task.reward_model,
            prompts=prompts,
            seed=seed,
        )
    return {name: getattr(found, "gold" if name == "lexicon" else name) for name in MEASURED}


def _write(task: Task, curves: Sequence[Curve], options: argparse.Namespace) -> None:
    options.output.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "-m", "benchmarks.learning_curves"])
    common = task.flags(options.steps)
    draw(curves, options.output / "curves.svg")
    numbers = [
        {
            "estimator": curve.estimator,
            "seed": curve.seed,
            "settings": curve.settings,
            "reward": [round(value, 4) for value in curve.reward],
            "lexicon": [round(value, 4) for value in curve.lexicon],
            "before": {name: round(value, 4) for name, value in curve.before.items()},
            "after": {name: round(value, 4) for name, value in curve.after.items()},
        }
        for curve in curves
    ]
    lines = ",\n".join(json.dumps(row) for row in numbers)
    (options.output / "numbers.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    text = page(curves, command=command, common=common)
    (options.output / "README.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

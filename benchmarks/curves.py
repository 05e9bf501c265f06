"""What the runs of `benchmarks.learning_curves` gave: numbers, who learned, figure, page.

A curve is the mean of a step's samples, drawn at temperature 1 by the policy as it then was. Beside
it stands what was measured afterwards, by other code, on prompts drawn apart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

EDGE_STEPS = 3
"""The start and the end of a curve are means over so many steps."""

MEASURED = ("lexicon", "reward", "kl", "entropy", "length")
"""What is measured before and after a run, see `quartet.demo.measure`."""

COLORS = ("#2060a0", "#d06000", "#208040", "#a02060", "#6040a0", "#806020", "#404040")


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One run of one estimator."""

    estimator: str
    seed: int
    settings: Mapping[str, str]
    """Flags of the run that are not in the recipe."""
    reward: Sequence[float]
    """By step, over all samples of the step: what the estimator was given."""
    lexicon: Sequence[float]
    """By step, over the step's samples that are kept as text: what PPO is not given."""
    before: Mapping[str, float]
    """Of the model that the run began with: the names of `MEASURED`."""
    after: Mapping[str, float]
    """The same of the model that the run exported."""

    def save(self, file: Path) -> None:
        """Write JSON, in one piece."""
        aside = file.with_suffix(".tmp")
        aside.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        aside.replace(file)

    @classmethod
    def load(cls, file: Path) -> Curve:
        """Read what `save` wrote."""
        return cls(**json.loads(file.read_text(encoding="utf-8")))

    def problems(self) -> list[str]:
        """Why this is not a run that learned; empty when it is."""
        found: list[str] = []
        for name, values in (("reward", self.reward), ("lexicon score", self.lexicon)):
            if end(values) <= start(values):
                found.append(f"{name} in training {start(values):.3f} -> {end(values):.3f}")
        for name in ("reward", "lexicon"):
            if self.after[name] <= self.before[name]:
                found.append(
                    f"{name} afterwards {self.before[name]:.3f} -> {self.after[name]:.3f}",
                )
        return found


def start(values: Sequence[float]) -> float:
    """Mean of the first steps."""
    return fmean(values[:EDGE_STEPS])


def end(values: Sequence[float]) -> float:
    """Mean of the last steps."""
    return fmean(values[-EDGE_STEPS:])


def by_estimator(curves: Sequence[Curve]) -> dict[str, list[Curve]]:
    """Curves of each estimator, in the order in which they come."""
    found: dict[str, list[Curve]] = {}
    for curve in curves:
        found.setdefault(curve.estimator, []).append(curve)
    return found


def table(curves: Sequence[Curve]) -> str:
    """The numbers as a Markdown table: means over seeds, in brackets the lowest and highest."""
    lines = [
        "| estimator | seeds | reward in training | lexicon in training | reward afterwards | "
        "lexicon afterwards | KL per token | entropy | learned |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in by_estimator(curves).items():
        learned = sum(not run.problems() for run in runs)
        cells = [
            name,
            str(len(runs)),
            _change([start(r.reward) for r in runs], [end(r.reward) for r in runs]),
            _change([start(r.lexicon) for r in runs], [end(r.lexicon) for r in runs]),
            _change([r.before["reward"] for r in runs], [r.after["reward"] for r in runs]),
            _change([r.before["lexicon"] for r in runs], [r.after["lexicon"] for r in runs]),
            _spread([r.after["kl"] for r in runs]),
            _spread([r.after["entropy"] for r in runs]),
            f"{learned} of {len(runs)}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _change(before: Sequence[float], after: Sequence[float]) -> str:
    return f"{fmean(before):.2f} -> {_spread(after)}"


def _spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def draw(curves: Sequence[Curve], file: Path) -> None:
    """One figure: lexicon score and reward by step, the mean over seeds in a band of all seeds."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    panels = (
        ("lexicon", "lexicon score, which PPO is not given"),
        ("reward", "reward by the reward model"),
    )
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": file.name, "font.size": 8}):
        figure = Figure(figsize=(9, 4), layout="constrained")
        for place, (attribute, title) in enumerate(panels, start=1):
            axes = figure.add_subplot(1, 2, place)
            for color, (name, runs) in zip(COLORS, by_estimator(curves).items(), strict=False):
                _draw_one(axes, [getattr(run, attribute) for run in runs], name, color)
            axes.set_title(title, fontsize=9)
            axes.set_xlabel("step")
            axes.grid(alpha=0.3)
            if place == 1:
                axes.legend(fontsize=7, loc="lower right")
        figure.savefig(file, format="svg", metadata={"Date": None})


def _draw_one(axes: Any, values: Sequence[Sequence[float]], name: str, color: str) -> None:
    columns = list(zip(*(smoothed(row) for row in values), strict=True))
    steps = range(1, len(columns) + 1)
    lowest, highest = [min(c) for c in columns], [max(c) for c in columns]
    axes.fill_between(steps, lowest, highest, color=color, alpha=0.1, linewidth=0)
    axes.plot(steps, [fmean(c) for c in columns], label=name, color=color, linewidth=1.4)


def smoothed(values: Sequence[float]) -> list[float]:
    """Mean of each value and its neighbours: a step's samples are few."""
    return [fmean(values[max(0, i - 1) : i + 2]) for i in range(len(values))]


def page(curves: Sequence[Curve], *, command: str, common: Mapping[str, str]) -> str:
    """README.md of the results."""
    first = curves[0]
    lines = [
        "# Learning curves of all estimators",
        "",
        f"Made by `{command}`: this page, curves.svg, and numbers.json with each step of each run.",
        "",
        "The task is the demo's: a language model of half a million parameters that writes short",
        "sentences, and a reward model trained on pairs of them. All runs begin with the same two",
        f"models and have the same budget: {len(first.reward)} steps of 256 samples, two optimizer",
        "steps each. The lexicon score (vaderSentiment, -1 to 1) ordered the reward model's pairs;",
        "no run of PPO is given it.",
        "",
        "![curves](curves.svg)",
        "",
        "Lines are means over seeds and over three neighbouring steps, bands reach from the lowest",
        f"to the highest seed. In the table start and end of training are means over {EDGE_STEPS}",
        "steps. Afterwards means completions of 256 prompts that were drawn apart (the task has",
        "some 300 beginnings of sentences, which occur in training too), measured by other code",
        "than the training's (`quartet.demo.measure`). `a -> b (c to d)`: mean before, mean after,",
        "and the seeds' lowest and highest. A run learned when all four rose.",
        "",
        table(curves),
        "",
        "## Settings",
        "",
        "recipes/demo/ppo.yaml for all, and: " + _flags(common),
        "",
    ]
    for name, runs in by_estimator(curves).items():
        own = {k: v for k, v in runs[0].settings.items() if common.get(k) != v}
        lines.append(f"* {name}: {_flags(own) or 'nothing else'}")
    lines += [
        "",
        "Nothing was tuned for one estimator: learning rate, KL coefficient, temperature and sizes",
        "are those of the demo's PPO. gae alone has a critic, which begins as the reward model.",
        "flash_reinforce has its recipe (one sample a prompt, a correction by sequence, means over",
        "sequences), without the asynchronous generation that belongs to it.",
    ]
    return "\n".join(lines) + "\n"


def _flags(settings: Mapping[str, str]) -> str:
    return ", ".join(f"`--{name} {value}`" for name, value in settings.items())

"""What came out of the demo: table, report, verdict."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from quartet.demo.measure import Measurement
from quartet.demo.task import read_rows, sentiment
from quartet.obs.report import Curve, curves, page, plots, read_metrics, table

ROWS = {
    "reward": "reward (reward model)",
    "gold": "gold metric (lexicon)",
    "kl": "KL to the SFT model, per token",
    "entropy": "entropy, per token",
    "length": "length, tokens",
}
"""Fields of a measurement, and what they are called in tables."""

SHOWN = 3


def verdict(before: Measurement, after: Measurement) -> list[str]:
    """What went wrong, one sentence each; empty when the demo succeeded."""
    problems = []
    if not after.reward > before.reward:
        problems.append(f"the reward did not rise: {before.reward:.3f} -> {after.reward:.3f}")
    if after.gold < before.gold:
        problems.append(f"the gold metric fell: {before.gold:.3f} -> {after.gold:.3f}")
    return problems


def summary(before: Measurement, after: Measurement, *, seconds: Mapping[str, float]) -> str:
    """The table at the end, as text."""
    lines = [f"{'':<34}{'before':>10}{'after':>10}"]
    for name, title in ROWS.items():
        lines.append(f"{title:<34}{getattr(before, name):>10.3f}{getattr(after, name):>10.3f}")
    for title, measured in (("before PPO", before), ("after PPO", after)):
        lines.append(f"\n{title} [lexicon score]:")
        lines += [f"  {s.prompt}{s.completion}  [{s.gold:+.2f}]" for s in measured.samples[:SHOWN]]
    times = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
    lines.append(f"\ntime: {times}")
    return "\n".join(lines)


def write_report(
    file: Path,
    *,
    runs: Mapping[str, Path],
    commands: Mapping[str, Sequence[str]],
    before: Measurement,
    after: Measurement,
) -> None:
    """Write the report.

    Args:
        file: HTML file to write.
        runs: Folder of each stage's run, by its name; the last one is PPO's.
        commands: Command line of each stage.
        before: Measurement of the SFT model.
        after: Measurement of the policy.
    """
    problems = verdict(before, after)
    numbers = [(t, getattr(before, name), getattr(after, name)) for name, t in ROWS.items()]
    texts = [
        (a.prompt, a.completion, a.gold, b.completion, b.gold)
        for a, b in zip(before.samples[:10], after.samples[:10], strict=True)
    ]
    blocks = [
        ("Outcome", f"<p>{'; '.join(problems) or 'Reward and gold metric rose.'}</p>"),
        ("Before and after PPO, on held-out prompts", table(["", "before", "after"], numbers)),
        (
            "The same prompts, before and after",
            table(["prompt", "before", "gold", "after", "gold"], texts),
        ),
    ]
    for name, folder in runs.items():
        drawn = curves(read_metrics(folder / "metrics.jsonl"))
        if name == "ppo":
            drawn.insert(1, gold_curve(folder / "samples.jsonl"))
        command = table(["command"], [[shlex.join(commands[name])]])
        blocks.append((f"Stage {name}", command + plots(drawn)))
    file.write_text(page("Quartet demo", blocks), encoding="utf-8")


def gold_curve(samples: Path) -> Curve:
    """Mean lexicon score of each step's logged completions."""
    by_step: dict[int, list[float]] = defaultdict(list)
    for row in read_rows(samples):
        by_step[row["global_step"]].append(sentiment(row["completion"]))
    steps = sorted(by_step)
    means = [sum(by_step[step]) / len(by_step[step]) for step in steps]
    return Curve(title="Gold metric: lexicon score", steps=steps, values=means)

"""A run's numbers as one HTML file: `python -m quartet.obs.report RUN_FOLDER`.

The file needs nothing beside itself: plots are inlined as SVG.
"""

from __future__ import annotations

import argparse
import html
import io
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PLOTS = {
    "reward": "Reward",
    "return": "Return: reward and KL penalty",
    "kl": "KL(policy || reference) per token",
    "entropy_loss": "Entropy of the policy",
    "response_length": "Response length in tokens",
    "ppo_clip_ratio": "Share of clipped tokens",
    "policy_loss": "Policy loss",
    "critic_loss": "Critic loss",
    "actor_grad_norm": "Gradient norm of the policy",
    "gpt_loss": "SFT loss",
    "loss": "Loss",
    "acc": "Accuracy on pairs",
    "grad_norm": "Gradient norm",
    "lr": "Learning rate",
    "timing/step_total": "Seconds of a step",
}
"""Metrics that are plotted when a run has them, and their titles."""

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; margin: 1em 0 }
td, th { border: 1px solid #ccc; padding: .3em .7em; text-align: left; vertical-align: top }
td.number { text-align: right; font-variant-numeric: tabular-nums }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(320px, 1fr)); gap: 1em }
.plots svg { width: 100%; height: auto }
code { background: #f4f4f4; padding: .1em .3em }
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One plot."""

    title: str
    steps: Sequence[float]
    values: Sequence[float]


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Rows of a metrics file; the unfinished last line of a killed run is left out."""
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def curve(rows: Iterable[Mapping[str, Any]], name: str, title: str = "") -> Curve:
    """A metric of the training rows over their steps; rows without a finite number are left out."""
    points = [
        (row["global_step"], row[name])
        for row in rows
        if row.get("kind", "train") == "train"
        and isinstance(row.get(name), int | float)
        and math.isfinite(row[name])
    ]
    return Curve(title=title or name, steps=[p[0] for p in points], values=[p[1] for p in points])


def curves(rows: Sequence[Mapping[str, Any]]) -> list[Curve]:
    """All metrics of `PLOTS` that the rows have more than once."""
    made = [curve(rows, name, title) for name, title in PLOTS.items()]
    return [one for one in made if len(one.steps) > 1]


def plots(all_curves: Iterable[Curve]) -> str:
    """A grid of plots, as HTML."""
    return '<div class="plots">' + "".join(map(svg, all_curves)) + "</div>"


def svg(one: Curve) -> str:
    """One plot; the same numbers give the same text."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": one.title, "font.size": 8}):
        figure = Figure(figsize=(4, 2.4), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(one.steps, one.values, linewidth=1.4, color="#2060a0")
        axes.set_title(one.title, fontsize=9)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]  # without the XML prologue, which HTML does not know


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """An HTML table; numbers get three digits behind the point."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f'<td class="number">{value:.3f}</td>'
    return f"<td>{html.escape(str(value))}</td>"


def page(title: str, blocks: Iterable[tuple[str, str]]) -> str:
    """A whole page of (heading, HTML) blocks."""
    body = "".join(f"<h2>{html.escape(head)}</h2>\n{content}\n" for head, content in blocks)
    name = html.escape(title)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{name}</h1>\n{body}</body></html>\n"
    )


def run_blocks(folder: Path) -> list[tuple[str, str]]:
    """Plots, last numbers and first samples of a run's folder."""
    rows = read_metrics(folder / "metrics.jsonl")
    last = next((row for row in reversed(rows) if row.get("kind", "train") == "train"), {})
    numbers = [(k, float(v)) for k, v in last.items() if isinstance(v, int | float)]
    blocks = [
        ("Curves", plots(curves(rows))),
        ("Last step", table(["metric", "value"], numbers)),
    ]
    samples = folder / "samples.jsonl"
    if samples.is_file() and (shown := read_metrics(samples)):
        step = shown[-1]["global_step"]
        picked = [s for s in shown if s["global_step"] == step][:10]
        rows_ = [(s["prompt"], s["completion"], float(s["reward"] or 0.0)) for s in picked]
        blocks.append((f"Samples of step {step}", table(["prompt", "completion", "reward"], rows_)))
    return blocks


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report of a run's folder."""
    parser = argparse.ArgumentParser(prog="python -m quartet.obs.report", description=__doc__)
    parser.add_argument("folder", type=Path, help="a run's folder, with metrics.jsonl in it")
    parser.add_argument("--output", type=Path, help="default: report.html in that folder")
    args = parser.parse_args(argv)
    if not (args.folder / "metrics.jsonl").is_file():
        sys.stderr.write(f"error: there is no metrics.jsonl in {args.folder}\n")
        return 2
    output = args.output or args.folder / "report.html"
    output.write_text(page(args.folder.name, run_blocks(args.folder)), encoding="utf-8")
    sys.stdout.write(f"{output}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

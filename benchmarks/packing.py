"""`python -m benchmarks.packing`: what attention over packed rows costs, with masks and without.

Two transformer layers of SmolLM2-135M's shape, with random weights, train on one packed row of as
many tokens as a micro-batch may have: once with sdpa and the mask that transformers makes for it,
once with the learner's own attention, which takes the sequences one after the other. Each in
a process of its own with one thread. The norms of the gradients must agree.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
WAYS = ("masks", "sequences")
BUDGETS = (1024, 2048, 4096, 8192)
LONGEST = 1024
TOLERANCE = 1e-4


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.packing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--budgets", type=int, nargs="+", default=BUDGETS, help="tokens of a row")
    parser.add_argument("--longest", type=int, default=LONGEST, help="tokens of a sequence (1024)")
    parser.add_argument("--worker", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        print(json.dumps(_step(options.worker, options.budgets[0], options.longest)))
        return 0
    print(
        f"{'tokens':>7}{'sequences':>11}{'CPU s: masks':>14}{'own':>7}{'MiB: masks':>12}{'own':>7}"
    )
    code = 0
    for budget in options.budgets:
        masks, own = (_in_process(way, budget, options.longest) for way in WAYS)
        print(
            f"{budget:>7}{own['sequences']:>11}{masks['cpu']:>14.2f}{own['cpu']:>7.2f}"
            f"{masks['mib']:>12.0f}{own['mib']:>7.0f}",
            flush=True,
        )
        if abs(masks["answer"] - own["answer"]) > TOLERANCE * abs(masks["answer"]):
            print(f"DO NOT AGREE: {masks['answer']} with masks, {own['answer']} without")
            code = 1
    return code


def _in_process(way: str, budget: int, longest: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.packing", "--worker", way]
    command += ["--budgets", str(budget), "--longest", str(longest)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    if run.returncode != 0:
        raise RuntimeError(f"{way} failed:\n{run.stderr[-2000:]}")
    return json.loads(run.stdout.splitlines()[-1])


def _step(way: str, budget: int, longest: int) -> dict[str, float]:
    """Forward and backward over one packed row of `budget` tokens."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from benchmarks.learner.batch import make_batch
    from benchmarks.learner.meter import Meter
    from quartet.nn import hidden_states, model_inputs
    from quartet.nn.attention import use_causal_attention
    from quartet.types import SequenceBatch

    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=1024,
        max_position_embeddings=max(longest, 2048),
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    if way == "sequences":
        use_causal_attention(model)
    batch = make_batch(budget, longest=min(longest, budget), vocabulary=1024)
    whole = np.cumsum(batch.lengths)
    lengths = batch.lengths[: int((whole < budget).sum()) + 1].copy()
    lengths[-1] -= max(0, int(lengths.sum()) - budget)  # the last one fills the row

    def run(taken: np.ndarray) -> float:
        sequences = SequenceBatch(
            token_ids=batch.token_ids[: taken.sum()].astype(np.int32),
            lengths=taken.astype(np.int32),
        )
        hidden = hidden_states(model, model_inputs(sequences, packed=True, device="cpu"))
        loss = hidden.square().mean() + hidden[:, 0].mean()
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients))

    run(np.array([4, 4]))
    model.zero_grad()
    meter = Meter()
    with meter:
        answer = run(lengths)
    return {
        "answer": answer,
        "sequences": len(lengths),
        "cpu": meter.cpu_seconds,
        "mib": meter.peak_mib - meter.before_mib,
    }


if __name__ == "__main__":
    sys.exit(main())

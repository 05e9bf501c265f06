"""`.venv-vllm/bin/python -m benchmarks.rollout`: what the service costs over the bare vLLM.

The same prompts, seeds and engine arguments go to `quartet serve rollout` over gRPC, one prompt a
call, and to vLLM called directly in a process of its own: `vllm.LLM`, its class for batches, and
`AsyncLLM`, which the service holds. All stand ready from the beginning; they take turns, so that a
busy machine is busy for all. CPU time is of all processes of a side, the caller's among them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.rollout.sides import Direct, Service, Side, Turn
from benchmarks.rollout.table import added_latency, alone, batch
from quartet.testing.tiny import TinyShape, make_tiny_model

MAX_LEN = 512
PROMPT_TOKENS = 48
ALONE_TOKENS = 8
"""New tokens of a call that is made alone."""
SHAPE = TinyShape(hidden=512, layers=8, heads=8, kv_heads=4, intermediate=1536, max_length=MAX_LEN)
"""About 22 million parameters."""


def flags_of(model: Path, rows: int) -> list[str]:
    """The service's flags, from which all sides make their engine's arguments."""
    return [
        *("--rollout.engine", "vllm", "--rollout.model_name_or_path", str(model)),
        *("--data.max_len", str(MAX_LEN), "--rollout.max_num_sequences", str(rows)),
        *("--ds.param_dtype", "fp32"),
    ]


async def measure(options: argparse.Namespace, folder: Path) -> None:
    """Start all sides, let them take turns, print."""
    model = options.model or make_tiny_model(folder / "model", shape=SHAPE)
    rows = max(options.prompts)
    flags = flags_of(model, rows)
    sides: list[Side] = []
    try:
        sides.append(Service(flags, folder, in_flight=rows))
        sides += [Direct(kind, flags) for kind in options.against]
        await asyncio.gather(*(side.ready() for side in sides))
        await _take_turns(sides, _prompts(min(options.prompts)), ALONE_TOKENS, 1)  # warms up
        for count in options.prompts:
            turns = await _take_turns(sides, _prompts(count), options.tokens, options.turns)
            size = f"{PROMPT_TOKENS} tokens, {options.tokens} new tokens each"
            print(f"{count} prompts of {size}", *batch(turns), *added_latency(turns), sep="\n  ")
        if options.calls:
            turns = await _take_turns(sides, _prompts(1), ALONE_TOKENS, options.calls)
            print(f"1 prompt, {ALONE_TOKENS} new tokens, {options.calls} times", end="\n  ")
            print(*alone(turns), sep="\n  ")
    finally:
        await asyncio.gather(*(side.end() for side in sides))


def _prompts(count: int) -> list[list[int]]:
    draw = random.Random(count)
    return [[draw.randrange(5, 300) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


async def _take_turns(
    sides: list[Side], prompts: list[list[int]], tokens: int, count: int
) -> dict[str, list[Turn]]:
    """So many turns of each side, by its name."""
    turns: dict[str, list[Turn]] = {side.name: [] for side in sides}
    for number in range(count):
        # Whoever comes first in one round comes last in the next.
        for side in sides if number % 2 else sides[::-1]:
            turns[side.name].append(await side.turn(prompts, tokens))
    return turns


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rollout",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, help="folder of a model; by default one is made")
    parser.add_argument("--prompts", type=int, nargs="+", default=[32, 256], help="batch sizes")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of each prompt")
    parser.add_argument("--turns", type=int, default=3, help="times that each side is measured")
    parser.add_argument("--calls", type=int, default=100, help="calls made alone, 0 for none")
    parser.add_argument(
        "--against",
        nargs="+",
        choices=("LLM", "AsyncLLM"),
        default=["LLM", "AsyncLLM"],
        help="classes of vLLM to compare with",
    )
    options = parser.parse_args(argv)
    # As for the service's workers: two threads on a busy machine of two cores wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="rollout-benchmark-") as name:
        asyncio.run(measure(options, Path(name)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`.venv-vllm/bin/python -m benchmarks.rollout`: what the service costs over the bare vLLM.

The same prompts, seeds and engine arguments go to `quartet serve rollout` over gRPC, one prompt a
call, and to `vllm.LLM` in a process of its own. Both engines stand ready from the beginning; they
take turns, so that a busy machine is busy for both. CPU time is of all processes of a side.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import cpu_seconds, process_tree
from benchmarks.rollout.direct import ANSWER
from quartet.clients import RolloutClient
from quartet.testing.tiny import TinyShape, make_tiny_model
from quartet.types import PromptGroup, SamplingParams

MAX_LEN = 512
PROMPT_TOKENS = 48
SHAPE = TinyShape(hidden=512, layers=8, heads=8, kv_heads=4, intermediate=1536, max_length=MAX_LEN)
"""About 22 million parameters: large enough that the engine, not Python, is what is measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One batch on one side."""

    tokens: int
    seconds: float
    """On the clock."""
    cpu: float
    """CPU seconds of all processes."""


class Direct:
    """The bare engine."""

    def __init__(self, model: Path, rows: int) -> None:
        arguments = {
            "model": str(model),
            "dtype": "float32",
            "max_model_len": MAX_LEN,
            "max_num_seqs": rows,
            "enforce_eager": True,
            "logprobs_mode": "processed_logprobs",
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "kv_cache_memory_bytes": 1 << 30,
            "enable_prefix_caching": False,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.rollout.direct", json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        self._answer()

    def turn(self, prompts: list[list[int]], tokens: int) -> Turn:
        """Complete all prompts."""
        assert self.process.stdin
        before = cpu_of(self.process.pid)
        self.process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        return Turn(**answer, cpu=cpu_of(self.process.pid) - before)

    def _answer(self) -> dict[str, float]:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        raise RuntimeError("vLLM ended")


class Service:
    """The engine behind the service."""

    def __init__(self, model: Path, rows: int, folder: Path) -> None:
        self._ready = folder / "ready.json"
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "quartet", "serve", "rollout", "--rollout.engine", "vllm"),
                *("--rollout.model_name_or_path", str(model), "--data.max_len", str(MAX_LEN)),
                *("--rollout.max_num_sequences", str(rows), "--ds.param_dtype", "fp32"),
                *("--vllm.extra", f"kv_cache_memory_bytes={1 << 30}"),
                *("--rpc.port", "0", "--rpc.ready_file", str(self._ready)),
                "--rpc.die_with_parent",
            ],
            env=environment(),
        )

    async def serving(self) -> RolloutClient:
        """Wait until it serves."""
        while not self._ready.exists():  # noqa: ASYNC110 - no event crosses the process boundary
            await asyncio.sleep(0.1)
        client = RolloutClient(json.loads(self._ready.read_text())["address"])
        await client.wait_ready(900)
        return client

    async def turn(
        self, client: RolloutClient, prompts: list[list[int]], tokens: int
    ) -> tuple[Turn, list[float]]:
        """Complete all prompts, each in a call of its own; also the seconds of each call."""
        sampling = SamplingParams(max_new_tokens=tokens, ignore_eos=True, min_new_tokens=0)
        latencies: list[float] = []

        async def call(seed: int, ids: list[int]) -> int:
            called = time.monotonic()
            result = await client.generate(
                request_id=f"{called}-{seed}",
                groups=[PromptGroup(group_id="g", prompt_token_ids=tuple(ids), seeds=(seed,))],
                sampling=sampling,
            )
            latencies.append(time.monotonic() - called)
            return len(result.groups[0].completions[0].token_ids)

        before, own = cpu_of(self.process.pid), time.process_time()
        began = time.monotonic()
        made = await asyncio.gather(*(call(i, ids) for i, ids in enumerate(prompts)))
        seconds = time.monotonic() - began
        cpu = cpu_of(self.process.pid) - before + time.process_time() - own
        return Turn(tokens=sum(made), seconds=seconds, cpu=cpu), latencies


def environment() -> dict[str, str]:
    """The same for both sides."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCH_COMPILE_DISABLE": "1",
    }


def cpu_of(pid: int) -> float:
    """CPU seconds of a process and all that it started."""
    return sum(cpu_seconds(member) for member in process_tree(pid))


async def measure(options: argparse.Namespace, folder: Path) -> None:
    """Start both sides, let them take turns, print."""
    model = options.model or make_tiny_model(folder / "model", shape=SHAPE)
    rows = max(options.prompts)
    service = Service(model, rows, folder)
    try:
        client = await service.serving()
        direct = Direct(model, rows)
        try:
            for count in options.prompts:
                await _compare(direct, service, client, count, options)
        finally:
            direct.process.terminate()
            direct.process.wait()
            await client.close()
    finally:
        service.process.terminate()
        service.process.wait()


async def _compare(
    direct: Direct,
    service: Service,
    client: RolloutClient,
    count: int,
    options: argparse.Namespace,
) -> None:
    draw = random.Random(count)
    prompts = [[draw.randrange(5, 300) for _ in range(PROMPT_TOKENS)] for _ in range(count)]
    bare: list[Turn] = []
    served: list[Turn] = []
    latencies: list[float] = []
    for turn in range(options.turns + 1):
        one = await asyncio.to_thread(direct.turn, prompts, options.tokens)
        other, seconds = await service.turn(client, prompts, options.tokens)
        if turn:  # the first warms up
            bare.append(one)
            served.append(other)
            latencies += seconds
    print(f"{count} prompts of {PROMPT_TOKENS} tokens, {options.tokens} new tokens each")
    for name, turns in (("vllm.LLM", bare), ("service", served)):
        rate = [t.tokens / t.seconds for t in turns]
        by_cpu = [t.tokens / t.cpu for t in turns]
        print(
            f"  {name:10} {statistics.median(rate):8.0f} tokens/s   "
            f"{statistics.median(by_cpu):8.0f} tokens/CPU s"
        )
    pairs = list(zip(served, bare, strict=True))
    clock = statistics.median((s.tokens / s.seconds) / (b.tokens / b.seconds) for s, b in pairs)
    cpu = statistics.median((s.tokens / s.cpu) / (b.tokens / b.cpu) for s, b in pairs)
    p50, p99 = (statistics.quantiles(latencies, n=100)[i] for i in (49, 98))
    print(f"  ratio      {clock:8.3f} on the clock, {cpu:.3f} by CPU time (median of turns)")
    print(f"  one call   {p50:8.2f} s p50, {p99:.2f} s p99 (all begin at once)")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rollout",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, help="folder of a model; by default one is made")
    parser.add_argument("--prompts", type=int, nargs="+", default=[32, 256], help="batch sizes")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each prompt")
    parser.add_argument("--turns", type=int, default=3, help="times that each side is measured")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="rollout-benchmark-") as name:
        asyncio.run(measure(options, Path(name)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m benchmarks.grpc_share`: the share of a PPO step that serialisation and transport take.

1. A real PPO run with five service processes, with the demo's settings and sizes. Its messages are
   recorded, and the CPU time of all its processes is taken over some steps.
2. The recorded calls of these steps are made again, through the product's clients and codec, to
   its server and servicers in another process, where the answers are ready. The CPU time of both
   processes is taken.
3. The second divided by the first is the share.

Both come from one run on one machine, so the ratio means something where neither number does.
CPU time counts work, not waiting: how long the processes had to wait for a busy machine is in
neither of them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import cpu_by_name
from benchmarks.recording import FOLDER_VARIABLE, Call, calls_of_steps, read_calls
from benchmarks.replay import Cost, replay

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "demo" / "ppo.yaml"
RUN_NAME = "grpc-share"
POLL_SECONDS = 0.01
LOG_LINES = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Some steps of a real run."""

    num_steps: int
    calls: list[Call]
    """Made in these steps, by trainer and learner."""
    cpu_seconds: dict[str, float]
    """Of each process in these steps."""
    seconds: float
    """On the clock."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    options = _options(argv)
    try:
        with tempfile.TemporaryDirectory(prefix="grpc-share-") as name:
            folder = Path(name)
            print(f"a PPO run with {RECIPE.relative_to(ROOT)}, measured over {options.steps} steps")
            run = measure_run(folder, options)
            print(f"making {len(run.calls)} calls again")
            costs = replay(run.calls)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(report(run, costs))
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grpc_share", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--steps", type=int, default=3, help="PPO steps to measure (3)")
    parser.add_argument(
        "--policy", help="model folder of policy and reference; default: a random one, as large"
    )
    parser.add_argument("--reward", help="model folder of reward and critic; likewise")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for the PPO run (300)")
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error("--steps: at least one step is measured")
    if bool(options.policy) != bool(options.reward):
        parser.error("--policy and --reward go together: they share a tokenizer")
    return options


def measure_run(folder: Path, options: argparse.Namespace) -> Run:
    """Run PPO with files below `folder`, and stop it after the measured steps.

    Raises:
        RuntimeError: it ended early or took too long; the message has the end of its log.
    """
    recordings = folder / "recordings"
    recordings.mkdir()
    # The first step warms up; the last one keeps the processes at work while they are read.
    command = [*_command(folder, options), "--train.max_steps", str(options.steps + 2)]
    environment = os.environ | {
        FOLDER_VARIABLE: str(recordings),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    log = folder / "run.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        metrics = folder / "runs" / RUN_NAME / "metrics.jsonl"
        deadline = time.monotonic() + options.timeout
        _wait_for_rows(metrics, 1, process, deadline, log)
        began, before = time.monotonic(), cpu_by_name(process.pid)
        _wait_for_rows(metrics, 1 + options.steps, process, deadline, log)
        ended, after = time.monotonic(), cpu_by_name(process.pid)
    finally:
        _stop(process)
    return Run(
        num_steps=options.steps,
        calls=calls_of_steps(read_calls(recordings), 2, 1 + options.steps),
        cpu_seconds={name: after[name] - before[name] for name in before},
        seconds=ended - began,
    )


def _command(folder: Path, options: argparse.Namespace) -> list[str]:
    policy, reward = options.policy, options.reward
    if policy is None:
        policy, reward = make_models(folder / "models")
    prompts = folder / "prompts.jsonl"
    write_prompts(prompts)
    flags = {
        "config": RECIPE,
        "actor.model_name_or_path": policy,
        "reward.model_name_or_path": reward,
        "critic.model_name_or_path": reward,
        "data.prompt_dataset": prompts,
        "ckpt.output_dir": folder / "model",
        "rollout.engine": "transformers",
        "run.dir": folder / "runs",
        "run.name": RUN_NAME,
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "benchmarks.recording", "train", "ppo", *words]


def make_models(folder: Path) -> tuple[Path, Path]:
    """Random models of the demo's size: a policy, and a reward model with its tokenizer."""
    import numpy as np

    from quartet.demo.task import sentences
    from quartet.testing.tiny import TinyShape, make_tiny_model, train_tokenizer

    shape = TinyShape(
        hidden=128, layers=2, heads=4, kv_heads=4, intermediate=384, vocab=960, max_length=64
    )
    rows = sentences(np.random.default_rng(0), 2000)
    tokenizer = train_tokenizer(
        (row["prompt"] + row["completion"] for row in rows),
        vocab=shape.vocab,
        max_length=shape.max_length,
    )
    policy = make_tiny_model(folder / "policy", shape=shape, tokenizer=tokenizer)
    reward = make_tiny_model(
        folder / "reward", shape=shape, head="reward", seed=1, tokenizer=tokenizer
    )
    # What a reward model's training leaves there, for --reward.normalize_enable.
    config = json.loads((reward / "config.json").read_text())
    (reward / "config.json").write_text(json.dumps(config | {"mean": 0.0, "std": 1.0}))
    return policy, reward


def write_prompts(path: Path) -> None:
    """The demo's prompts."""
    import numpy as np

    from quartet.demo.task import NUM_PROMPTS, prompts

    rows = prompts(np.random.default_rng(0), NUM_PROMPTS)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _wait_for_rows(
    path: Path, number: int, process: subprocess.Popen[bytes], deadline: float, log: Path
) -> None:
    """Wait until a file has so many lines: a run writes one at the end of a step."""
    while not path.exists() or path.read_bytes().count(b"\n") < number:
        problem = ""
        if process.poll() is not None:
            problem = f"the run ended with exit code {process.returncode}"
        elif time.monotonic() > deadline:
            problem = f"the run did not finish step {number} in time"
        if problem:
            lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            raise RuntimeError("\n".join([f"{problem}; the end of its output:", *lines]))
        time.sleep(POLL_SECONDS)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt the run, which stops its services; kill it when it does not listen."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(45)
    if process.poll() is None:
        # Its services notice, and end with it.
        process.kill()
        process.wait()


def report(run: Run, costs: Sequence[Cost]) -> str:
    """The tables."""
    total = sum(run.cpu_seconds.values())
    head = f"{'a step of PPO':24}{'CPU ms':>10}{'share':>9}"
    lines = ["", head]
    for name, seconds in sorted(run.cpu_seconds.items(), key=lambda item: -item[1]):
        lines.append(f"{name:24}{_ms(seconds, run):>10}{seconds / total:>9.1%}")
    lines.append(f"{'all':24}{_ms(total, run):>10}{1:>9.0%}")
    lines += ["", f"{'gRPC in it':24}{'calls':>8}{'KiB':>9}{'CPU ms':>10}{'share':>9}"]
    for cost in sorted(costs, key=lambda cost: -cost.cpu_seconds):
        lines.append(
            f"{cost.method.label:24}{cost.num_calls / run.num_steps:>8.1f}"
            f"{cost.num_bytes / 1024 / run.num_steps:>9.1f}{_ms(cost.cpu_seconds, run):>10}"
            f"{cost.cpu_seconds / total:>9.2%}"
        )
    spent = sum(cost.cpu_seconds for cost in costs)
    num_calls = sum(cost.num_calls for cost in costs) / run.num_steps
    num_kib = sum(cost.num_bytes for cost in costs) / 1024 / run.num_steps
    lines.append(f"{'all':24}{num_calls:>8.1f}{num_kib:>9.1f}{_ms(spent, run):>10}")
    lines += [
        "",
        f"a step took {run.seconds / run.num_steps:.2f} s on the clock of this machine",
        f"serialisation and transport: {spent / total:.2%} of a step's CPU time",
    ]
    return "\n".join(lines)


def _ms(seconds: float, run: Run) -> str:
    return f"{1000 * seconds / run.num_steps:.1f}"


if __name__ == "__main__":
    sys.exit(main())

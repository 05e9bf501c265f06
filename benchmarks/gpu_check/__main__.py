"""`python -m benchmarks.gpu_check`: what no test on a CPU can show, in one command.

Pushes by CUDA IPC on one GPU and by NCCL between two, greedy tokens after each against
transformers, memory before, during and after a sleep, and the digest of a GPU's bytes. Each line
says ok, failed with the reason, or skipped with what is missing.

Exit codes: 0 all that could run is ok, 1 something failed, 3 there is no GPU. With --cpu it runs
the same code with gloo and with ipc in main memory; without a GPU the exit code is 3 all the same.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu_check.checks import Outcome, Pushes, attempt, digests_agree, sleep_frees
from benchmarks.gpu_check.served import served
from quartet.testing.tiny import TinyShape, make_tiny_model
from quartet.types import PushBackend

NO_GPU = 3
"""Exit code where there is none."""
SHAPE = TinyShape(hidden=256, layers=4, heads=4, kv_heads=2, intermediate=768, max_length=512)


async def on_gpus(options: argparse.Namespace, folders: list[Path]) -> list[Outcome]:
    """All that needs GPUs; the sender is this process, on the first."""
    gpus = _visible()
    found = [
        await attempt("digest on the GPU equals that on the CPU", lambda: digests_agree("cuda:0"))
    ]
    pushes = Pushes(folders, "cuda:0")
    found += await _with_service(options, folders, pushes, [PushBackend.IPC], gpus[0], sleeps=True)
    if len(gpus) < 2:
        why = "it needs two GPUs, and one is visible"
        return [*found, Outcome(name="push by nccl", state="skipped", detail=why)]
    found += await _with_service(options, folders, pushes, [PushBackend.NCCL], gpus[1])
    return found


async def on_cpu(options: argparse.Namespace, folders: list[Path]) -> list[Outcome]:
    """The same pushes through main memory and sockets."""
    pushes = Pushes(folders, "cpu")
    return await _with_service(options, folders, pushes, [PushBackend.GLOO, PushBackend.IPC], "")


async def _with_service(
    options: argparse.Namespace,
    folders: list[Path],
    pushes: Pushes,
    backends: Sequence[PushBackend],
    gpu: str,
    *,
    sleeps: bool = False,
) -> list[Outcome]:
    """Start a service on one GPU or none, and push to it twice: the second meets a warm path."""
    where = "" if gpu else ", on the CPU"
    flags = ["--rollout.engine", options.engine, "--ds.param_dtype", "fp32"]
    flags += ["--rollout.model_name_or_path", str(folders[0]), "--data.max_len", "512"]
    if options.engine == "vllm":
        flags += ["--vllm.gpu_memory_utilization", "0.4"]
        flags += ["--vllm.enable_sleep"] if gpu else []
    found: list[Outcome] = []

    async def start() -> str:
        async with served(flags, python=options.python, visible_gpus=gpu) as client:
            for backend, turn in itertools.product(backends, ("first", "second")):
                name = f"push by {backend}{where}, {turn}"
                push = partial(pushes.push, client, backend)
                found.append(await attempt(name, push))
            if sleeps:
                check = partial(sleep_frees, client, pushes, "cuda:0")
                found.append(await attempt("sleep and wake", check))
        return "started and ended"

    return [await attempt(f"rollout service for {' and '.join(backends)}{where}", start), *found]


def _visible() -> list[str]:
    """Names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES has them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in given.split(",") if name.strip()]
    return names or [str(index) for index in range(torch.cuda.device_count())]


async def _run(options: argparse.Namespace) -> list[Outcome]:
    with tempfile.TemporaryDirectory() as folder:
        folders = [make_tiny_model(Path(folder) / str(s), shape=SHAPE, seed=s) for s in (0, 1)]
        found = await on_gpus(options, folders) if torch.cuda.is_available() else []
        return found + (await on_cpu(options, folders) if options.cpu else [])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check")
    parser.add_argument("--cpu", action="store_true", help="run what a CPU can, too")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--python", default=sys.executable, help="the Python that has the engine")
    options = parser.parse_args(arguments)
    has_gpu = torch.cuda.is_available()
    print(torch.cuda.get_device_name(0) if has_gpu else "there is no GPU here", flush=True)
    found = asyncio.run(_run(options))
    print(*found, sep="\n", flush=True)
    if any(outcome.state == "failed" for outcome in found):
        return 1
    return 0 if has_gpu else NO_GPU


if __name__ == "__main__":
    sys.exit(main())

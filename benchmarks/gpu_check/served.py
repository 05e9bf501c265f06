"""A rollout service in a process of its own, on chosen GPUs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from quartet.clients import RolloutClient
from quartet.types import PromptGroup, SamplingParams

START_SECONDS = 600.0
"""Longest time that an engine may take to load: vLLM compiles and captures graphs."""


@contextlib.asynccontextmanager
async def served(
    flags: Sequence[str], *, python: str, visible_gpus: str
) -> AsyncIterator[RolloutClient]:
    """Start `quartet serve rollout`, end it after the block.

    Args:
        flags: Of the service.
        python: The Python that has the engine.
        visible_gpus: CUDA_VISIBLE_DEVICES for it; empty hides all.

    Raises:
        RuntimeError: It ended while it loaded.
        TimeoutError: It did not load in START_SECONDS.
    """
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.json"
        command = [python, "-m", "quartet", "serve", "rollout", *flags]
        command += ["--rpc.port", "0", "--rpc.die_with_parent", "--rpc.ready_file", str(ready)]
        with (Path(folder) / "log").open("wb") as log:
            process = subprocess.Popen(  # noqa: ASYNC220 - it returns at once
                command,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": visible_gpus},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            async with asyncio.timeout(START_SECONDS):
                while not ready.exists():
                    if process.poll() is not None:
                        last = (Path(folder) / "log").read_text(errors="replace")[-2000:]
                        raise RuntimeError(f"the rollout service ended at its start: {last}")
                    await asyncio.sleep(0.1)
            address = json.loads(ready.read_text())["address"]
            async with RolloutClient(address) as client:
                await client.wait_ready(START_SECONDS)
                yield client
        finally:
            process.terminate()
            try:
                await asyncio.to_thread(process.wait, 30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def greedy(
    client: RolloutClient, prompts: Sequence[Sequence[int]], tokens: int
) -> list[list[int]]:
    """The `tokens` most likely tokens after each prompt, as the service gives them."""
    result = await client.generate(
        request_id=f"check-{time.time_ns()}",
        groups=[
            PromptGroup(group_id=str(i), prompt_token_ids=tuple(prompt), num_samples=1)
            for i, prompt in enumerate(prompts)
        ],
        sampling=SamplingParams(temperature=0.0, max_new_tokens=tokens, ignore_eos=True),
    )
    return [group.completions[0].token_ids.tolist() for group in result.groups]

"""The two sides of the benchmark of the rollout service: each makes the same batches."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.processes import cpu_seconds, process_tree
from benchmarks.rollout.direct import ANSWER
from quartet.clients import RolloutClient
from quartet.types import PromptGroup, SamplingParams

_END_SECONDS = 20.0
"""How long a side gets to end by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One batch on one side."""

    tokens: int
    seconds: float
    """On the clock."""
    cpu: float
    """CPU seconds of all processes of the side, its caller among them."""
    front: float
    """Those of them outside the processes that vLLM itself starts."""
    latencies: list[float]
    """Seconds of each prompt, from the call to all of its tokens."""


class Side(Protocol):
    """What makes tokens from prompts."""

    name: str

    async def ready(self) -> None:
        """Wait until it can."""
        ...

    async def turn(self, prompts: list[list[int]], tokens: int) -> Turn:
        """Complete all prompts, all at once."""
        ...

    async def end(self) -> None:
        """Leave no process behind."""
        ...


class Direct:
    """The bare engine, in a process of its own.

    Args:
        kind: "LLM" or "AsyncLLM".
        flags: Of the service; the engine gets the arguments that the service makes of them.
    """

    def __init__(self, kind: str, flags: list[str]) -> None:
        self.name = f"vllm.{kind}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.rollout.direct", kind, *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Not struck by the Ctrl-C of a terminal: `end` stops it in order.
            start_new_session=True,
        )

    async def ready(self) -> None:
        """Wait until the model is loaded."""
        await asyncio.to_thread(self._answer)

    async def turn(self, prompts: list[list[int]], tokens: int) -> Turn:
        """Complete all prompts."""
        assert self.process.stdin
        before = cpu_of(self.process.pid)
        self.process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self.process.stdin.flush()
        answer = await asyncio.to_thread(self._answer)
        whole, front = (b - a for a, b in zip(before, cpu_of(self.process.pid), strict=True))
        return Turn(**answer, cpu=whole, front=front)

    async def end(self) -> None:
        """Without lines it ends, and its engine with it."""
        assert self.process.stdin
        members = process_tree(self.process.pid) if self.process.poll() is None else []
        self.process.stdin.close()
        await asyncio.to_thread(end_tree, self.process, members)

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        raise RuntimeError(f"{self.name} ended")


class Service:
    """The engine behind the service."""

    name = "service"

    def __init__(self, flags: list[str], folder: Path, in_flight: int) -> None:
        self._ready = folder / "ready.json"
        self._in_flight = in_flight
        self._client: RolloutClient | None = None
        self._calls = 0
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "quartet", "serve", "rollout", *flags),
                *("--rpc.port", "0", "--rpc.ready_file", str(self._ready)),
                *("--rpc.max_concurrent_calls", str(in_flight), "--rpc.die_with_parent"),
            ],
            start_new_session=True,
        )

    async def ready(self) -> None:
        """Wait until it serves."""
        while not self._ready.exists():
            if self.process.poll() is not None:
                raise RuntimeError("the service ended at its start")
            await asyncio.sleep(0.1)
        address = json.loads(self._ready.read_text())["address"]
        self._client = RolloutClient(address, max_in_flight=self._in_flight)
        await self._client.wait_ready(1800)

    async def turn(self, prompts: list[list[int]], tokens: int) -> Turn:
        """Complete all prompts, each in a call of its own."""
        before, own = cpu_of(self.process.pid), time.process_time()
        began = time.monotonic()
        done = await asyncio.gather(
            *(self._call(seed, ids, tokens) for seed, ids in enumerate(prompts))
        )
        seconds = time.monotonic() - began
        own = time.process_time() - own
        whole, front = (b - a for a, b in zip(before, cpu_of(self.process.pid), strict=True))
        return Turn(
            tokens=sum(made for made, _ in done),
            seconds=seconds,
            cpu=whole + own,
            front=front + own,
            latencies=[latency for _, latency in done],
        )

    async def end(self) -> None:
        """Stop it in order."""
        if self._client is not None:
            await self._client.close()
        members = process_tree(self.process.pid) if self.process.poll() is None else []
        self.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(end_tree, self.process, members)

    async def _call(self, seed: int, ids: list[int], tokens: int) -> tuple[int, float]:
        assert self._client
        began = time.monotonic()
        self._calls += 1
        result = await self._client.generate(
            request_id=f"{self._calls}",
            groups=[PromptGroup(group_id="g", prompt_token_ids=tuple(ids), seeds=(seed,))],
            sampling=SamplingParams(max_new_tokens=tokens, ignore_eos=True, min_new_tokens=0),
        )
        return len(result.groups[0].completions[0].token_ids), time.monotonic() - began


def cpu_of(pid: int) -> tuple[float, float]:
    """CPU seconds of a process and all that it started; and of those that are not vLLM's own."""
    whole = front = 0.0
    for member in process_tree(pid):
        with suppress(FileNotFoundError, ProcessLookupError):
            seconds = cpu_seconds(member)
            whole += seconds
            name = Path(f"/proc/{member}/comm").read_text()
            front += 0.0 if name.startswith("VLLM") else seconds
    return whole, front


def end_tree(
    process: subprocess.Popen[Any], members: list[int], *, wait: float = _END_SECONDS
) -> None:
    """Wait so many seconds for a process that is ending; then end what is left of its tree."""
    try:
        process.wait(wait)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for member in members:
        if member != process.pid:
            with suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)

"""The checks, one function each: it says what it saw, or raises."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu_check.served import greedy
from quartet.clients import RolloutClient
from quartet.types import PushBackend
from quartet.weights import manifest_of_model, pack_bucket, plan_buckets, push_weights
from quartet.weights.digest import bucket_digest

PROMPTS = ((5, 6, 7, 8), tuple(range(20, 60)), tuple(range(100, 228)))
NEW_TOKENS = 24
BUCKET_BYTES = 16 << 20
MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One line of the report."""

    name: str
    state: Literal["ok", "failed", "skipped"]
    detail: str

    def __str__(self) -> str:
        """The line."""
        return f"{self.state:<8} {self.name}: {self.detail}"


class CheckError(Exception):
    """What was seen is not what should be."""


async def attempt(name: str, check: Callable[[], Awaitable[str]]) -> Outcome:
    """Run a check; whatever it raises is its reason."""
    try:
        return Outcome(name=name, state="ok", detail=await check())
    except Exception as error:
        return Outcome(name=name, state="failed", detail=f"{type(error).__name__}: {error}")


async def digests_agree(device: str) -> str:
    """The digest of the same bytes on the CPU and on `device`."""
    generator = torch.Generator().manual_seed(0)
    sizes = (0, 1, 7, 4096, 32768 * 8 + 3, 5_000_011)
    for dtype in (torch.float32, torch.bfloat16):
        for size in sizes:
            here = torch.randn(size, generator=generator).to(dtype)
            if bucket_digest(here) != bucket_digest(here.to(device)):
                raise CheckError(f"they differ for {size} elements of {dtype}")
    return f"equal for {2 * len(sizes)} buffers of up to 20 MB"


class Pushes:
    """Pushes of two models in turn, so that every push changes what is generated."""

    def __init__(self, folders: list[Path], device: str) -> None:
        """Load the models on `device`, from where they are pushed."""
        self._device = device
        self._models = [
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
            for folder in folders
        ]
        self._version = 0
        self.pushed: Any = None
        """The model that was pushed last."""

    async def push(self, client: RolloutClient, backend: PushBackend) -> str:
        """Push the model whose turn it is to one replica, and compare what is generated."""
        self._version += 1
        model = self._models[self._version % len(self._models)]
        manifest = manifest_of_model(model, bucket_bytes=BUCKET_BYTES)

        def source() -> Iterator[tuple[int, torch.Tensor]]:
            tensors = dict(model.named_parameters())
            for bucket in plan_buckets(manifest):
                yield bucket.index, pack_bucket(bucket, tensors)

        result = await push_weights(
            manifest=manifest,
            tensors=source,
            replicas=[client],
            epoch=time.time_ns(),
            policy_version=self._version,
            backend=backend,
            device=self._device,
        )
        [replica] = result.replicas
        if not replica.committed:
            raise CheckError(f"{replica.failed_phase}: {replica.error}")
        before = None if self.pushed is None else await self._wanted(self.pushed)
        self.pushed = model
        same = await self.compare(client)
        if before is not None and before == await self._wanted(model):
            raise CheckError("the two models generate the same: nothing is shown")
        seconds = result.transfer_seconds
        rate = result.total_bytes / max(seconds, 1e-9) / 1e9
        return (
            f"{result.total_bytes / MIB:.0f} MiB in {result.num_buckets} buckets, transfer "
            f"{seconds:.3f} s ({rate:.2f} GB/s), commit {result.commit_seconds:.3f} s; {same}"
        )

    async def compare(self, client: RolloutClient) -> str:
        """Greedy tokens of the replica against transformers with the weights pushed last."""
        wanted = await self._wanted(self.pushed)
        got = await greedy(client, PROMPTS, NEW_TOKENS)
        if got != wanted:
            odd = next(
                i
                for i, pair in enumerate(zip(got, wanted, strict=True))
                if len(set(map(tuple, pair))) > 1
            )
            raise CheckError(f"greedy tokens of prompt {odd} are {got[odd]}, not {wanted[odd]}")
        return f"greedy tokens of {len(PROMPTS)} prompts equal those of transformers"

    async def _wanted(self, model: Any) -> list[list[int]]:
        return await asyncio.to_thread(_generate, model, self._device)


async def sleep_frees(client: RolloutClient, pushes: Pushes, device: str) -> str:
    """Memory of the GPU before, during and after a sleep, and what is generated after it."""
    before = _used(device)
    await client.sleep(level=1)
    asleep = _used(device)
    await client.wake()
    same = await pushes.compare(client)
    sizes = [f"{size / MIB:.0f}" for size in (before, asleep, _used(device))]
    seen = "MiB used before, asleep, after: " + ", ".join(sizes)
    if asleep >= before:
        raise CheckError(f"sleep freed nothing: {seen}")
    return f"{seen}; {same}"


def _used(device: str) -> int:
    """Bytes of a GPU that all processes together have taken."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


@torch.no_grad()
def _generate(model: Any, device: str) -> list[list[int]]:
    """Most likely tokens, an end of text among them: `generate` would stop there or avoid it."""
    out: list[list[int]] = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device=device)
        for _ in range(NEW_TOKENS):
            likeliest = model(ids).logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, likeliest], dim=1)
        out.append(ids[0, len(prompt) :].tolist())
    return out

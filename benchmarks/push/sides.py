"""The processes of `python -m benchmarks.push`, and the model that is sent."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from quartet_learner import weights
from quartet_learner.model import load_model
from quartet_learner.settings import LearnerSettings
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.processes import cpu_seconds, process_tree
from benchmarks.push.peer import ANSWER, HOST, TIMEOUT
from quartet.clients import RolloutClient
from quartet.testing.tiny import TinyShape, make_tiny_model
from quartet.types import PushBackend, PushResult, WeightManifest
from quartet.weights import PushClock, manifest_of_model, plan_buckets, push_weights
from quartet.weights.group import SenderStore, form_group


class CountedClient(RolloutClient):
    """A client that counts its calls by method."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.calls: Counter[str] = Counter()

    def _options(self, method: str, timeout: float | None, request_id: str) -> dict[str, Any]:
        """Of a call that begins: all methods ask for them."""
        self.calls[method] += 1
        return super()._options(method, timeout, request_id)


class Service:
    """`quartet serve rollout` in a process of its own."""

    def __init__(self, model: Path, folder: Path, engine: str, python: str) -> None:
        self._ready = folder / "ready.json"
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "quartet", "serve", "rollout", "--rollout.engine", engine),
                *("--rollout.model_name_or_path", str(model), "--data.max_len", "512"),
                *(("--rollout.python", python) if python else ()),
                *(("--vllm.extra", f"kv_cache_memory_bytes={1 << 28}") if engine == "vllm" else ()),
                *("--ds.param_dtype", "fp32", "--rpc.port", "0"),
                *("--rpc.ready_file", str(self._ready), "--rpc.die_with_parent"),
            ],
            env=environment(),
        )

    async def client(self) -> CountedClient:
        """Wait until it serves."""
        while not self._ready.exists():
            if self.process.poll() is not None:
                raise RuntimeError("the rollout service ended at its start")
            await asyncio.sleep(0.1)
        client = CountedClient(json.loads(self._ready.read_text())["address"])
        await client.wait_ready(900)
        return client

    def cpu(self) -> float:
        """CPU seconds of it and all that it started."""
        return cpu_of(self.process.pid)

    def end(self) -> None:
        """Stop it and wait."""
        self.process.terminate()
        self.process.wait()


class Peer:
    """The process that receives by raw gloo, and reads files."""

    def __init__(self) -> None:
        self._store = SenderStore(HOST, timeout=TIMEOUT)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.push.peer", self._store.address(HOST)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        self._group = form_group(
            backend=PushBackend.GLOO,
            store=self._store.store,
            group_name="raw",
            rank=0,
            world_size=2,
            host=HOST,
            timeout=TIMEOUT,
        )

    def raw(self, buffers: Sequence[Tensor]) -> float:
        """Broadcast buffers of fp32 that are there; seconds until the other side has them all."""
        self._say({"sizes": [len(buffer) for buffer in buffers]})
        begun = time.monotonic()
        for buffer in buffers:
            self._group.broadcast(buffer)
        self._hear()
        return time.monotonic() - begun

    def disk(self, state: dict[str, Tensor], folder: Path) -> float:
        """Write one file and have it read; seconds. Nothing is forced to the disk."""
        begun = time.monotonic()
        save_file(state, folder / "model.safetensors")
        self._say({"folder": str(folder)})
        self._hear()
        return time.monotonic() - begun

    def cpu(self) -> float:
        """CPU seconds of the other process."""
        return cpu_of(self.process.pid)

    def end(self) -> None:
        """Stop it and wait."""
        self.process.terminate()
        self.process.wait()

    def _say(self, turn: dict[str, object]) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(turn) + "\n")
        self.process.stdin.flush()

    def _hear(self) -> None:
        assert self.process.stdout
        if self.process.stdout.readline().strip() != ANSWER:
            raise RuntimeError("the other process ended")


class Sender:
    """The learner's own source of buckets, in this process."""

    def __init__(self, model: Path) -> None:
        settings = LearnerSettings(model_name_or_path=str(model), param_dtype="float32")
        self.model, _ = load_model(settings)
        self.version = 0

    def manifest(self, bucket_bytes: int) -> WeightManifest:
        """What is sent."""
        return manifest_of_model(self.model.hf, bucket_bytes=bucket_bytes)

    def state(self) -> dict[str, Tensor]:
        """All tensors by name; no two share memory."""
        parameters = dict(self.model.hf.named_parameters())
        return {name: parameter.detach() for name, parameter in parameters.items()}

    def packed(self, manifest: WeightManifest) -> list[Tensor]:
        """Buffers of the buckets' sizes: two memories of the largest, as in a push."""
        sizes = [bucket.numel for bucket in plan_buckets(manifest)]
        pair = [torch.ones(max(sizes)) for _ in range(2)]
        return [pair[i % 2][:size] for i, size in enumerate(sizes)]

    async def push(self, client: CountedClient, manifest: WeightManifest) -> PushResult:
        """One whole push, which must succeed."""
        clock = PushClock()
        self.version += 1
        result = await push_weights(
            manifest=manifest,
            tensors=lambda: weights.buckets(self.model, manifest, clock),
            replicas=[client],
            epoch=time.time_ns(),
            policy_version=self.version,
            backend=PushBackend.GLOO,
            group_timeout=TIMEOUT,
            clock=clock,
        )
        (replica,) = result.replicas
        if not replica.committed:
            raise RuntimeError(f"the push failed: {replica.failed_phase}: {replica.error}")
        return result


def make_model(folder: Path) -> Path:
    """A random model with the shapes of SmolLM2-135M, and a tokenizer of its own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    make_tiny_model(folder, shape=TinyShape(hidden=576, heads=9, kv_heads=3, intermediate=1536))
    config = AutoConfig.from_pretrained(folder)
    config.vocab_size, config.num_hidden_layers = 49152, 30
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def cpu_of(pid: int) -> float:
    """CPU seconds of a process and all that it started."""
    return sum(cpu_seconds(member) for member in process_tree(pid))


def environment() -> dict[str, str]:
    """The same for all."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCH_COMPILE_DISABLE": "1",
    }

"""`python -m benchmarks.push`: where the time of a weight push goes, and what it could be.

The learner's own source of weights, in this process, pushes SmolLM2-135M in fp32 (538 MB) over gloo
to a `quartet serve rollout` in another. Without that model, a random one of its shapes does. In
turns with it, the same bytes in buckets of the same sizes go by a bare gloo broadcast to warm
memory of a third process, and by a safetensors file that is written and read. All figures are
medians over the turns; the first warms up.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.push.sides import CountedClient, Peer, Sender, Service, make_model
from quartet.types import PushResult
from quartet.weights import plan_buckets, total_bytes

MODEL = Path(".cache/smollm2-135m")
SIDE_BY_SIDE = ("gather", "pack", "digest", "broadcast")
ONE_BY_ONE = ("prepare", "transfer", "commit")


@dataclass(kw_only=True, slots=True)
class Turns:
    """All turns with one bucket size; seconds."""

    pushes: list[PushResult] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    push_cpu: list[float] = field(default_factory=list)
    """Of sender and service together."""
    raw: list[float] = field(default_factory=list)
    raw_cpu: list[float] = field(default_factory=list)
    disk: list[float] = field(default_factory=list)


async def measure(options: argparse.Namespace, folder: Path) -> None:
    """Start all processes, let them take turns, print."""
    model = options.model or make_model(folder / "model")
    service = Service(model, folder, options.engine, options.python)
    peer = Peer()
    try:
        sender = Sender(model)
        client = await service.client()
        try:
            for mib in options.bucket_mib:
                turns = await _take_turns(sender, client, service, peer, mib, options, folder)
                _print(turns, client, sender, mib)
        finally:
            await client.close()
    finally:
        peer.end()
        service.end()


async def _take_turns(
    sender: Sender,
    client: CountedClient,
    service: Service,
    peer: Peer,
    mib: float,
    options: argparse.Namespace,
    folder: Path,
) -> Turns:
    manifest = sender.manifest(int(mib * (1 << 20)))
    packed, state = sender.packed(manifest), sender.state()
    warm_up, turns = Turns(), Turns()
    for number in range(options.turns + 1):
        into = turns if number else warm_up
        client.calls.clear()
        cpu, begun = service.cpu() + time.process_time(), time.monotonic()
        into.pushes.append(await sender.push(client, manifest))
        into.whole.append(time.monotonic() - begun)
        into.push_cpu.append(service.cpu() + time.process_time() - cpu)
        cpu = peer.cpu() + time.process_time()
        into.raw.append(await asyncio.to_thread(peer.raw, packed))
        into.raw_cpu.append(peer.cpu() + time.process_time() - cpu)
        into.disk.append(await asyncio.to_thread(peer.disk, state, folder))
    return turns


def _print(turns: Turns, client: CountedClient, sender: Sender, mib: float) -> None:
    manifest = sender.manifest(int(mib * (1 << 20)))
    size = total_bytes(manifest)
    load = os.getloadavg()[0]
    print(
        f"{len(manifest.tensors)} tensors, {size / 1e6:.0f} MB in {len(plan_buckets(manifest))} "
        f"buckets of {mib:g} MiB, {len(turns.raw)} turns, load {load:.1f}"
    )

    def of(phase: str) -> float:
        return statistics.median(getattr(push, f"{phase}_seconds") for push in turns.pushes)

    def line(name: str, seconds: float, more: str = "") -> None:
        rate = f"{size / seconds / 1e9:8.2f} GB/s" if seconds > 0 else ""
        print(f"  {name:22} {seconds * 1e3:8.0f} ms {rate}{more}")

    line("whole push", statistics.median(turns.whole))
    for phase in ONE_BY_ONE:
        line(f"  {phase}", of(phase))
    print("  side by side, in the sender, until the transfer is over:")
    for phase in SIDE_BY_SIDE:
        line(f"  {phase}", of(phase))
    line("raw gloo", statistics.median(turns.raw))
    line("safetensors on disk", statistics.median(turns.disk))
    transfers = [push.transfer_seconds for push in turns.pushes]
    print("  ratios, medians of the turns:")
    print(f"    transfer to raw gloo     {_ratio(turns.raw, transfers):.2f}")
    print(f"    whole push to raw gloo   {_ratio(turns.raw, turns.whole):.2f}")
    print(f"    whole push to disk       {_ratio(turns.disk, turns.whole):.2f}")
    print(
        f"  CPU, all processes: push {statistics.median(turns.push_cpu):.2f} s, "
        f"raw gloo {statistics.median(turns.raw_cpu):.2f} s"
    )
    calls = ", ".join(f"{name} {count}" for name, count in client.calls.items())
    print(f"  gRPC calls of the last push: {client.calls.total()} ({calls})", flush=True)


def _ratio(reference: list[float], seconds: list[float]) -> float:
    """How fast against a reference: 1 is as fast."""
    pairs = zip(reference, seconds, strict=True)
    return statistics.median(other / own for other, own in pairs)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.push",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        type=Path,
        default=MODEL if MODEL.is_dir() else None,
        help=f"folder of a model; {MODEL} if it is there",
    )
    parser.add_argument(
        "--engine", choices=["transformers", "vllm"], default="transformers", help="that receives"
    )
    parser.add_argument("--python", default="", help="interpreter that has vLLM (--rollout.python)")
    parser.add_argument(
        "--bucket-mib", type=float, nargs="+", default=[64], help="bucket sizes, one after another"
    )
    parser.add_argument("--turns", type=int, default=5, help="times that each is measured")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="push-benchmark-") as name:
        asyncio.run(measure(options, Path(name)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

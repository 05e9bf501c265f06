"""What the benchmark of the rollout service prints, from the turns of its sides."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.rollout.sides import Service, Turn


def batch(turns: Mapping[str, Sequence[Turn]]) -> Iterator[str]:
    """Lines with the speed of each side, and the service's share of the others' speed."""
    for name, made in turns.items():
        clock = statistics.median(t.tokens / t.seconds for t in made)
        cpu = statistics.median(t.tokens / t.cpu for t in made)
        front = statistics.median(1e3 * t.front / len(t.latencies) for t in made)
        # vllm.LLM may have its engine in its own process.
        apart = f", {front:.1f} CPU ms a prompt outside the engine" if _is_apart(made) else ""
        yield f"{name:13} {clock:7.0f} tokens/s {cpu:7.0f} tokens/CPU s{apart}"
    served = turns[Service.name]
    for name, bare in turns.items():
        if name != Service.name:
            clock = [
                (s.tokens / s.seconds) / (b.tokens / b.seconds) for s, b in _pairs(served, bare)
            ]
            cpu = [(s.tokens / s.cpu) / (b.tokens / b.cpu) for s, b in _pairs(served, bare)]
            yield (
                f"service / {name}: {statistics.median(clock):.3f} on the clock "
                f"({min(clock):.3f} to {max(clock):.3f}), {statistics.median(cpu):.3f} by CPU time "
                f"({min(cpu):.3f} to {max(cpu):.3f})"
            )


def added_latency(turns: Mapping[str, Sequence[Turn]]) -> Iterator[str]:
    """A line for each bare side: how much later the tokens of a prompt are there."""
    served = [second for turn in turns[Service.name] for second in turn.latencies]
    for name, made in turns.items():
        if name != Service.name:
            bare = [second for turn in made for second in turn.latencies]
            yield f"a call beside all others: {_added(served, bare, 's', 1)} than {name}"


def alone(turns: Mapping[str, Sequence[Turn]]) -> Iterator[str]:
    """The same for calls that are alone in the engine."""
    served = [turn.latencies[0] for turn in turns[Service.name]]
    for name, made in turns.items():
        if name != Service.name:
            bare = [turn.latencies[0] for turn in made]
            yield f"a call alone: {_added(served, bare, 'ms', 1e3)} than {name}"


def _is_apart(made: Sequence[Turn]) -> bool:
    return any(turn.front < turn.cpu for turn in made)


def _pairs(served: Sequence[Turn], bare: Sequence[Turn]) -> Iterator[tuple[Turn, Turn]]:
    return zip(served, bare, strict=True)


def _added(served: Sequence[float], bare: Sequence[float], unit: str, factor: float) -> str:
    """Quantiles of both, in seconds, and their differences in the unit."""
    parts: list[str] = []
    for place, label in ((49, "p50"), (98, "p99")):
        ours, theirs = (_percentiles(values)[place] * factor for values in (served, bare))
        parts.append(f"{label} {ours:.2f} {unit}, {ours - theirs:+.2f} {unit}")
    return "; ".join(parts)


def _percentiles(values: Sequence[float]) -> list[float]:
    """The 99 cuts of a hundred; of a single value they are all that value."""
    known = values if len(values) > 1 else [*values, *values]
    return statistics.quantiles(known, n=100, method="inclusive")

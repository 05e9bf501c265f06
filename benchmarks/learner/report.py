"""The table of `benchmarks.learner`, and the check that all computed the same."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from benchmarks.learner.worker import Measured

BASE = "plain"
"""The contender that the others are compared with."""
TOLERANCE = 1e-4
"""Of loss and gradient norm, relative."""


def report(measured: Sequence[Measured], num_tokens: int) -> str:
    """The table: `num_tokens` is the batch's, without padding."""
    rows = _by_contender(measured)
    base = rows[BASE]
    lines = [
        "",
        "tokens of the batch per second, ratios to the plain loop; best and median of the turns",
        f"{'':22}{'padded':>8}{'CPU: best':>11}{'median':>8}{'clock: best':>13}{'median':>8}"
        f"{'tokens/CPU-s':>14}{'peak MiB':>10}{'of step':>9}",
    ]
    for name, runs in rows.items():
        cpu, clock = ([getattr(r, field) for r in runs] for field in ("cpu_seconds", "seconds"))
        base_cpu, base_clock = (
            [getattr(r, field) for r in base] for field in ("cpu_seconds", "seconds")
        )
        peak = max(run.peak_mib for run in runs)
        own = max(run.peak_mib - run.before_mib for run in runs)
        lines.append(
            f"{name:22}{runs[0].tokens_computed / num_tokens:>8.2f}"
            f"{min(base_cpu) / min(cpu):>11.2f}{median(base_cpu) / median(cpu):>8.2f}"
            f"{min(base_clock) / min(clock):>13.2f}{median(base_clock) / median(clock):>8.2f}"
            f"{num_tokens / min(cpu):>14.1f}{peak:>10.0f}{own:>9.0f}"
        )
    return "\n".join([*lines, ""])


def disagreements(measured: Sequence[Measured]) -> list[str]:
    """What differs from the plain loop's numbers by more than rounding."""
    base = _by_contender(measured)[BASE][0]
    found: list[str] = []
    for run in measured:
        for name in ("loss", "grad_norm"):
            value, wanted = getattr(run, name), getattr(base, name)
            if abs(value - wanted) > TOLERANCE * abs(wanted):
                found.append(f"{run.contender}: {name} {value:.6g}, {BASE} has {wanted:.6g}")
    return found


def _by_contender(measured: Sequence[Measured]) -> dict[str, list[Measured]]:
    rows: dict[str, list[Measured]] = {}
    for run in measured:
        rows.setdefault(run.contender, []).append(run)
    return rows

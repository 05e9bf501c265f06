"""What the benchmark of the rollout service says of its turns."""

from __future__ import annotations

import os
import select
import subprocess
import sys

from benchmarks.processes import process_tree
from benchmarks.rollout.sides import Turn, cpu_of, end_tree
from benchmarks.rollout.table import added_latency, alone, batch


def turn(seconds, *, tokens=100, cpu=2.0, front=1.0, latencies=(0.5, 0.6)):
    return Turn(tokens=tokens, seconds=seconds, cpu=cpu, front=front, latencies=list(latencies))


def test_ratios_are_of_turns_that_follow_each_other():
    """A machine that is twice as busy in one round than in the next does not move the ratio."""
    turns = {
        "service": [turn(10.0), turn(20.0), turn(10.0)],
        "vllm.LLM": [turn(9.0, cpu=1.8), turn(18.0, cpu=1.8), turn(9.0, cpu=1.8)],
    }
    lines = list(batch(turns))
    assert "service / vllm.LLM: 0.900 on the clock (0.900 to 0.900), 0.900 by CPU time" in lines[2]
    assert lines[0].split()[:2] == ["service", "10"]
    assert "500.0 CPU ms a prompt outside the engine" in lines[0]


def test_a_process_that_holds_its_engine_has_no_outside():
    turns = {"service": [turn(1.0)], "vllm.LLM": [turn(1.0, front=2.0)]}
    service, bare, _ = batch(turns)
    assert "outside" in service
    assert "outside" not in bare


def test_added_latency_is_the_difference_of_quantiles():
    turns = {
        "service": [turn(1.0, latencies=(0.4, 0.5, 0.6))],
        "vllm.AsyncLLM": [turn(1.0, latencies=(0.3, 0.4, 0.5))],
    }
    assert list(added_latency(turns)) == [
        "a call beside all others: p50 0.50 s, +0.10 s; p99 0.60 s, +0.10 s than vllm.AsyncLLM"
    ]
    calls = {name: [turn(1.0, latencies=[s])] * 2 for name, s in (("service", 0.05), ("b", 0.04))}
    assert list(alone(calls)) == [
        "a call alone: p50 50.00 ms, +10.00 ms; p99 50.00 ms, +10.00 ms than b"
    ]


def test_no_process_of_a_side_is_left_behind():
    """vLLM's engine outlives a parent that is killed."""
    child = "import subprocess, sys; subprocess.Popen(['sleep', '600']); print(1, flush=True)"
    stubborn = f"{child}; import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"
    process = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    process.stdout.readline()
    [child_pid] = process_tree(process.pid)[1:]
    whole, front = cpu_of(process.pid)
    assert whole == front >= 0  # none of them is vLLM's
    with open(os.pidfd_open(child_pid)) as child_ends:
        end_tree(process, process_tree(process.pid), wait=0.1)
        assert process.returncode
        assert select.select([child_ends], [], [], 60)[0]

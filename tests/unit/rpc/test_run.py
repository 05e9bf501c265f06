"""`run` as a process: ready file, signals, exit codes, end of the parent."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quartet.clients import RewardClient
from quartet.errors import UnavailableError
from quartet.rpc import probe
from quartet.types import ScoreItem

SCRIPT = Path(__file__).parent / "service_process.py"
ITEM = ScoreItem(sample_id="s", prompt="", query="eel")
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts service processes, and leaves none behind."""
    processes: list[subprocess.Popen[str]] = []

    def begin(mode: str = "serve", **settings: Any) -> subprocess.Popen[str]:
        command = [sys.executable, str(SCRIPT), mode, json.dumps(settings)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "QUARTET_LOG_FORMAT": "plain"}
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)
        processes.append(process)
        return process

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def wait_for(path: Path, process: subprocess.Popen[str], seconds: float = 30) -> dict[str, Any]:
    """Content of the ready file, once it is there."""
    limit = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < limit, "no ready file"
        time.sleep(0.01)
    return json.loads(path.read_text())


def test_life_of_a_server(start: Start, tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    ready.write_text("left by an earlier process")
    process = start(ready_file=str(ready), metrics={"port": 0})
    assert process.stdout is not None
    assert process.stdout.readline() == "starting\n"
    content = wait_for(ready, process)
    assert content["pid"] == process.pid
    assert list(tmp_path.iterdir()) == [ready]

    async def use() -> None:
        async with RewardClient(content["address"]) as client:
            await client.wait_ready(10)
            await client.score(request_id="r", items=[ITEM])

    asyncio.run(use())
    assert probe.main([content["address"]]) == 0
    assert probe.main([content["address"], "quartet.api.reward.v1.RewardService"]) == 0
    assert probe.main([content["address"], "quartet.api.ref.v1.RefService"]) == 1
    with urllib.request.urlopen(f"http://{content['metrics_address']}/metrics") as answer:
        page = answer.read().decode()
    assert 'quartet_rpc_call_duration_seconds_count{code="OK",method="Score"' in page
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "stopping\n"), err
    assert probe.main([content["address"], "--timeout", "1"]) == 1


def test_health_is_not_serving_while_it_loads_and_a_signal_ends_the_loading(
    start: Start, tmp_path: Path
) -> None:
    ready = tmp_path / "ready.json"
    process = start("loading", ready_file=str(ready))
    address = wait_for(ready, process)["address"]
    assert asyncio.run(probe.probe(address)) == "NOT_SERVING"

    async def wait() -> None:
        async with RewardClient(address) as client:
            await client.wait_ready(0.2)

    with pytest.raises(UnavailableError, match=f"{address} after .* s: it answers NOT_SERVING"):
        asyncio.run(wait())
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=10)
    assert (process.returncode, out) == (0, "starting\nstopping\n")


def test_a_thread_that_still_loads_does_not_hold_up_the_end(start: Start, tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    process = start("thread", ready_file=str(ready))
    wait_for(ready, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 0


@pytest.mark.parametrize(
    ("mode", "code", "line"),
    [
        ("refuse", 1, "quartet reward: no model here (give one)"),
        ("misconfigured", 2, "quartet reward: flag x is wrong"),
        ("bug", 1, "quartet reward: KeyError: 'k'"),
    ],
)
def test_failure_to_start(start: Start, mode: str, code: int, line: str) -> None:
    process = start(mode)
    out, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert out == "starting\nstopping\n"
    assert line in err.splitlines()
    assert ("Traceback" in err) == (mode == "bug")


def test_a_service_that_cannot_go_on_ends_to_be_started_again(start: Start) -> None:
    process = start("dying")
    out, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert out.endswith("stopping\n")
    assert "the service cannot go on: the engine is gone" in err


def test_wrong_settings_end_before_anything_starts(start: Start) -> None:
    process = start(host="0.0.0.0")
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (2, "")
    assert err.startswith("quartet reward: rpc.host 0.0.0.0 can be reached")
    assert len(err.splitlines()) == 1


def test_drain_is_bounded_and_a_second_signal_ends_at_once(start: Start, tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    process = start("hold", ready_file=str(ready), drain_seconds=60)
    address = wait_for(ready, process)["address"]

    async def use() -> None:
        async with RewardClient(address, retry=False) as client:
            await client.wait_ready(10)
            call = asyncio.ensure_future(client.score(request_id="r", items=[ITEM]))
            await asyncio.sleep(0.2)
            process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.3)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            with pytest.raises(UnavailableError):
                await call

    asyncio.run(use())
    assert process.wait(timeout=10) == 128 + signal.SIGTERM


def test_it_ends_with_its_parent(start: Start, tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    parent = start("parent", ready_file=str(ready), die_with_parent=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    handle = os.pidfd_open(child)
    try:
        wait_for(ready, parent)
        parent.kill()
        readable, _, _ = select.select([handle], [], [], 20)
        assert readable, "the child lives on"
    finally:
        os.close(handle)

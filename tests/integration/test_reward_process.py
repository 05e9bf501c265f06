"""`quartet serve reward` as users run it: start, wrong settings, signals, nothing left behind."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from quartet.clients import RewardClient
from quartet.errors import InfraError
from quartet.types import Reward, ScoreItem

EXAMPLE = Path(__file__).parents[2] / "examples" / "math_reward_func.py"

HANGS = """
import subprocess, time
def reward_func(queries, prompts, labels, **kwargs):
    if labels[0] == "hang":
        subprocess.Popen(["sleep", "600"])
        time.sleep(600)
    return {"rewards": 1.0}
"""


@contextlib.asynccontextmanager
async def serve(tmp_path, *flags):
    """Start the command; yields the process and its address, kills what is left."""
    ready = tmp_path / "ready.json"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "quartet", "serve", "reward"),
        *("--rpc.port", "0", "--rpc.ready_file", str(ready), *flags),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(60):
            while not ready.exists() and process.returncode is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        address = json.loads(ready.read_text())["address"] if ready.exists() else ""
        yield process, address
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def alive(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def all_pids():
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def group_of(pid):
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(pid)
    return None


def children_of(pid):
    tasks = Path(f"/proc/{pid}/task")
    found = []
    for task in tasks.iterdir() if tasks.exists() else ():
        for child in (task / "children").read_text().split():
            found += [int(child), *children_of(int(child))]
    return found


async def all_gone(pids):
    async with asyncio.timeout(10):
        while any(map(alive, pids)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def item(label, response=""):
    return ScoreItem(sample_id="s", prompt="p ", query=f"p {response}", label=label)


async def test_serve_score_and_stop(tmp_path):
    async with serve(tmp_path, "--reward.remote_url", str(EXAMPLE)) as (process, address):
        async with RewardClient(address) as client:
            await client.wait_ready(60)
            batch = await client.score(request_id="r", items=[item("7", r"\boxed{7}")])
            assert batch.results[0].outcome == Reward(
                reward=1.0, score=1.0, extra_logs={"math_accuracy": 1.0, "has_boxed_answer": 1.0}
            )
        workers = children_of(process.pid)
        assert len(workers) == 2
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 30) == 0
        await all_gone(workers)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
async def test_no_process_outlives_it_even_in_the_middle_of_a_call(tmp_path, number):
    path = tmp_path / "hangs.py"
    path.write_text(HANGS)
    flags = ("--reward.remote_url", str(path), "--rpc.drain_seconds", "0.2")
    async with (
        serve(tmp_path, *flags) as (process, address),
        RewardClient(address, retry=False) as client,
    ):
        await client.wait_ready(60)
        call = asyncio.create_task(client.score(request_id="r", items=[item("hang")]))
        async with asyncio.timeout(30):
            while len(children_of(process.pid)) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        groups = set(map(os.getpgid, children_of(process.pid)))
        members = [pid for pid in all_pids() if group_of(pid) in groups]
        assert len(members) == 5  # two workers, their guards, and what one of them started
        os.kill(process.pid, number)
        with pytest.raises(InfraError):
            await asyncio.wait_for(call, 30)
        await asyncio.wait_for(process.wait(), 30)
        await all_gone(members)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "nothing says where rewards come from"),
        (("--reward.remote_url", "nowhere.py"), "No such file"),
        (("--reward.remote_url", "{no_func}"), "does not define reward_func"),
        (("--reward.remote_url", "{no_import}"), "No module named 'no_such_module'"),
        (("--reward.remote_url", "localhost:5000"), "is neither a Python file nor a URL"),
        (("--reward.remote_url", "x.py", "--reward.model_name_or_path", "y"), "two sources"),
        (("--reward.model_name_or_path", "/nowhere"), "/nowhere"),
    ],
)
async def test_wrong_settings_are_one_line_and_exit_code_2(tmp_path, flags, message):
    no_func, no_import = tmp_path / "no_func.py", tmp_path / "no_import.py"
    no_func.write_text("def reward(queries): return 1\n")
    no_import.write_text("import no_such_module\ndef reward_func(*_): return 1\n")
    flags = [flag.format(no_func=no_func, no_import=no_import) for flag in flags]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "quartet", "serve", "reward", *flags),
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"QUARTET_LOG_LEVEL": "ERROR"},
    )
    _, stderr = await asyncio.wait_for(process.communicate(), 60)
    lines = stderr.decode().strip().splitlines()
    assert process.returncode == 2, lines
    assert len(lines) == 1, lines
    assert message in lines[0]

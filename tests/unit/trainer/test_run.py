"""However a run ends: one clear last line, the right exit code, and no process left."""

import asyncio
import json
import math
import os
import signal
import sys
from pathlib import Path

import pytest

from quartet.errors import ConfigError, FatalError, InfraError
from quartet.trainer.run import first_cause, write_summary

DRIVER = Path(__file__).with_name("run_driver.py")


class Driver:
    """A run in a process of its own."""

    def __init__(self, folder, phase):
        self.folder = folder
        self.phase = phase

    async def __aenter__(self):
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(DRIVER), str(self.folder), self.phase),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        return self

    async def __aexit__(self, *_):
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()

    async def reach(self):
        """Wait until the run is in its phase."""
        marker = self.folder / f"at_{self.phase}"
        async with asyncio.timeout(30):
            while not marker.exists():  # noqa: ASYNC110 - another process's progress
                await asyncio.sleep(0.02)

    async def end(self):
        """Exit code, last line of stdout, last line of stderr."""
        async with asyncio.timeout(30):
            out, err = await self.process.communicate()
        lines = [text.decode().strip().splitlines() or [""] for text in (out, err)]
        return self.process.returncode, lines[0][-1], lines[1][-1]

    def left_behind(self):
        """Services of this run that still live."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    command = (entry / "cmdline").read_bytes().decode(errors="replace")
                except OSError:
                    continue
                if "fake_service.py" in command and str(self.folder) in command:
                    found.append(int(entry.name))
        return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
@pytest.mark.parametrize("phase", ["prepare", "start", "work", "stop"])
async def test_signal_in_any_phase_leaves_nothing(tmp_path, phase, number):
    async with Driver(tmp_path, phase) as driver:
        await driver.reach()
        driver.process.send_signal(number)
        code, _, last = await driver.end()
        assert code == 130
        assert last == "interrupted; no service was left behind"
        assert driver.left_behind() == []
    if phase == "work":
        assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "interrupted"


async def test_services_with_an_address_are_said_to_be_left_running(tmp_path):
    async with Driver(tmp_path, "elsewhere") as driver:
        await driver.reach()
        driver.process.send_signal(signal.SIGTERM)
        code, said, last = await driver.end()
    assert code == 130
    assert said == "SIGTERM: ending the run"
    assert last == ("interrupted; left running, as they have an address: learner at 127.0.0.1:7004")


async def test_second_signal_kills_at_once(tmp_path):
    async with Driver(tmp_path, "stop") as driver:
        await driver.reach()
        driver.process.send_signal(signal.SIGINT)
        driver.process.send_signal(signal.SIGINT)
        code, _, _ = await driver.end()
        assert code == 130
        assert driver.left_behind() == []


async def test_finished_run(tmp_path):
    async with Driver(tmp_path, "none") as driver:
        code, last, _ = await driver.end()
        assert (code, last) == (0, f"finished: {tmp_path}/run")
        assert driver.left_behind() == []
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 3)
    saved = (tmp_path / "run/config.yaml").read_text()
    assert "batch_size: 128" in saved


@pytest.mark.parametrize(
    ("phase", "code", "last"),
    [
        ("wrong", 2, "error: data.dataset is missing (give one)"),
        ("fail", 1, "error: the loss is on fire"),
        (
            "lost",
            1,
            "error: UNAVAILABLE: connection refused [127.0.0.1:7004] (start it again and begin "
            "anew; with --ckpt.save_steps N a run can be resumed by --ckpt.load_enable)",
        ),
        ("bug", 1, "error: ZeroDivisionError: one over nothing"),
    ],
)
async def test_failed_run(tmp_path, phase, code, last):
    async with Driver(tmp_path, phase) as driver:
        found, _, line = await driver.end()
        assert (found, line) == (code, last)
        assert driver.left_behind() == []
    # Wrong settings leave no trace on the disk.
    assert (tmp_path / "run").exists() == (phase != "wrong")


def test_a_summary_is_json_also_after_a_refused_step(tmp_path):
    outcome = {"metrics": {"actor_grad_norm": math.inf, "means": [math.nan, 1.0]}, "steps": 3}
    write_summary(tmp_path, outcome)
    text = (tmp_path / "summary.json").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    expected = {"metrics": {"actor_grad_norm": None, "means": [None, 1.0]}, "steps": 3}
    assert json.loads(text) == expected


async def test_folder_of_another_run_is_refused(tmp_path):
    async with Driver(tmp_path, "none") as driver:
        await driver.end()
    before = (tmp_path / "run/summary.json").read_text()
    async with Driver(tmp_path, "none") as driver:
        code, _, last = await driver.end()
    assert code == 2
    assert "already holds a run" in last
    assert (tmp_path / "run/summary.json").read_text() == before


async def test_dead_service_ends_the_run_with_its_log(tmp_path):
    async with Driver(tmp_path, "work") as driver:
        await driver.reach()
        pid = int((tmp_path / "pids").read_text().split()[1])
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(30):
            _, err = await driver.process.communicate()
        assert driver.process.returncode == 1
        assert b"error: critic ended with signal SIGKILL in the middle of the run" in err
        assert driver.left_behind() == []


def test_first_cause_prefers_what_can_be_mended():
    config, fatal, infra = ConfigError("c"), FatalError("f"), InfraError("i")
    inner = BaseExceptionGroup("x", [infra, asyncio.CancelledError()])
    assert first_cause(BaseExceptionGroup("y", [inner, fatal])) is fatal
    assert first_cause(BaseExceptionGroup("y", [inner, config, fatal])) is config
    assert first_cause(inner) is infra
    assert first_cause(ValueError("v")).args == ("v",)

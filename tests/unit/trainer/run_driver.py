"""A run of fake services that stops where it is told, for the tests of signals and exit codes.

Run as: run_driver.py FOLDER PHASE; it writes the file FOLDER/at_PHASE when it gets there.
"""

import asyncio
import sys
import time
from dataclasses import replace
from pathlib import Path

from quartet.config import LearnerConfig, RunConfig, SftConfig
from quartet.errors import ConfigError, FatalError, UnavailableError
from quartet.trainer import launch
from quartet.trainer.launch import LocalService
from quartet.trainer.run import Job, conduct

FAKE = Path(__file__).with_name("fake_service.py")


def main():
    folder, phase = Path(sys.argv[1]), sys.argv[2]
    config = replace(SftConfig(), run=RunConfig(dir=str(folder), name="run"))
    if phase == "elsewhere":
        config = replace(config, learner=LearnerConfig(address="127.0.0.1:7004"))
    launch.serve_command = lambda service, settings, ready: [
        *(sys.executable, str(FAKE), str(settings), str(ready))
    ]

    def reached(name):
        (folder / f"at_{name}").touch()

    def prepare(progress):
        if phase == "prepare":
            reached(phase)
            time.sleep(600)
        if phase == "wrong":
            raise ConfigError("data.dataset is missing", remedy="give one")
        settings = {"start": "silent: true", "stop": "stubborn: true"}.get(phase, "{}")
        if phase == "start":
            reached(phase)
        services = [
            LocalService(role=role, room="learner", settings=settings, drain_seconds=-4.9)
            for role in ("learner", "critic")
        ]
        return Job(services=[] if phase == "elsewhere" else services, body=body)

    async def body(run):
        (folder / "pids").write_text(" ".join(map(str, run.launcher.pids.values())))
        if phase == "fail":
            raise FatalError("the loss is on fire")
        if phase == "lost":
            raise UnavailableError("UNAVAILABLE: connection refused", replica="127.0.0.1:7004")
        if phase == "bug":
            raise ZeroDivisionError("one over nothing")
        if phase in ("work", "stop", "elsewhere"):
            reached(phase)
            await asyncio.sleep(600)
        run.summary["steps"] = 3

    async def serving(address, *_):
        return "SERVING"

    import quartet.rpc.probe

    quartet.rpc.probe.probe = serving
    return conduct(config, prepare)


sys.exit(main())

"""Faults that a service of the tests meets at a chosen point of a push.

A test writes `fault.json` into the folder that a service watches: where, at which index, and what
happens there. The service takes it once, says so in `fired.json`, and then does it to itself; so a
fault comes exactly where it is wanted, however busy the machine is.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class Faults:
    """The faults of this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def at(self, point: str, index: int = 0) -> str:
        """What is to happen at this point, or nothing. Each fault is taken once."""
        path = self.folder / "fault.json"
        try:
            fault = json.loads(path.read_text())
        except FileNotFoundError:
            return ""
        if (fault["at"], fault["index"]) != (point, index):
            return ""
        path.unlink()
        return fault["do"]

    def fire(self, do: str) -> None:
        """Do it, after a word to the test."""
        aside = self.folder / ".fired.json"
        aside.write_text(json.dumps({"when": time.monotonic()}))
        aside.rename(self.folder / "fired.json")
        if do in SIGNALS:
            os.kill(os.getpid(), SIGNALS[do])
        elif do == "kill child":
            _kill_children()
        elif do == "error":
            raise RuntimeError("the test wants an error here")
        elif do == "hold":
            while not (self.folder / "go").exists():
                time.sleep(0.005)

    def happen(self, point: str, index: int = 0) -> None:
        """Both."""
        if do := self.at(point, index):
            self.fire(do)


def install(folder: Path) -> None:
    """Put the points into the classes that a push passes through."""
    faults = Faults(folder)
    _watch_transport(faults)
    _watch_room(faults)
    _watch_engine(faults)


def _watch_transport(faults: Faults) -> None:
    from quartet.weights.transport import GroupTransport

    receive, send = GroupTransport.receive, GroupTransport.send

    def watched_receive(self, bucket, flat):
        faults.happen("bucket entry", bucket.index)
        if do := faults.at("bucket", bucket.index):
            _when_bytes_arrive(flat, lambda: faults.fire(do))
        receive(self, bucket, flat)
        if faults.at("digest", bucket.index):
            faults.fire("")
            flat[len(flat) // 2] += 1

    def watched_send(self, bucket, flat):
        faults.happen("send", bucket.index)
        send(self, bucket, flat)

    GroupTransport.receive, GroupTransport.send = watched_receive, watched_send


def _watch_room(faults: Faults) -> None:
    try:
        from quartet_rollout.room import RolloutRoom
    except ImportError:
        return
    prepare, receive, commit = RolloutRoom.prepare, RolloutRoom.receive, RolloutRoom.commit

    async def watched_prepare(self, request):
        faults.happen("prepare")
        answer = await prepare(self, request)
        faults.happen("joined")
        return answer

    async def watched_receive(self, request):
        async for event in receive(self, request):
            if event.event == "bucket":
                faults.happen("taken", event.bucket_index)
            yield event

    async def watched_commit(self, request):
        faults.happen("commit")
        return await commit(self, request)

    RolloutRoom.prepare, RolloutRoom.commit = watched_prepare, watched_commit
    RolloutRoom.receive = watched_receive


def _watch_engine(faults: Faults) -> None:
    try:
        from quartet_rollout.engines.transformers.engine import TransformersEngine
    except ImportError:
        return
    load = TransformersEngine.load_weights

    async def watched_load(self, tensors, policy_version):
        def watched():
            for index, item in enumerate(tensors):
                faults.happen("tensor", index)
                yield item

        return await load(self, watched(), policy_version)

    TransformersEngine.load_weights = watched_load


def _when_bytes_arrive(flat, then) -> None:
    """Do something in the middle of a broadcast: some bytes are there, the others are not."""
    flat.fill_(float("nan"))

    def watch():
        while bool(flat[0].isnan()):
            time.sleep(0)
        then()

    threading.Thread(target=watch, daemon=True).start()


def _kill_children() -> None:
    import psutil

    for child in psutil.Process().children(recursive=True):
        if "resource_tracker" not in " ".join(child.cmdline()):
            child.kill()

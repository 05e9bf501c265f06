"""Several ranks that act as one: rank 0 decides, the others do the same.

Rank 0 puts each command into a key-value store, where the other ranks wait for it without being
inside a collective, so a learner may idle for days. Then all ranks run the command, which is a
sequence of collectives that all of them enter. Commands travel as the contract's own messages.
"""

from __future__ import annotations

import io
import logging
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from quartet.errors import ConfigError
from quartet.rpc import lifetime
from quartet_learner.group import RankGroup
from quartet_learner.settings import LearnerSettings

log = logging.getLogger(__name__)

SETTINGS_VARIABLE = "QUARTET_LEARNER_SETTINGS"
"""Environment variable in which rank 0 hands its settings to the ranks it starts."""
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LOOPBACK = "127.0.0.1"
POLL = timedelta(seconds=30)
STOP = "stop"
CONFIG_ERROR_GRACE = 10.0
"""Seconds in which rank 0 may find, and say better, what made another rank refuse its settings."""


def pack(messages: Sequence[bytes]) -> bytes:
    """Several messages as one, each with its length before it."""
    return b"".join(struct.pack("<Q", len(message)) + message for message in messages)


def unpack(data: bytes) -> list[bytes]:
    """What `pack` packed."""
    stream = io.BytesIO(data)
    messages = []
    while head := stream.read(8):
        (size,) = struct.unpack("<Q", head)
        messages.append(stream.read(size))
    return messages


class CommandChannel:
    """Commands from rank 0 to all others, in order."""

    def __init__(self, store: Any, group: RankGroup) -> None:
        """Talk over `store`, a torch.distributed store that all ranks are connected to."""
        self._store = store
        self._group = group
        self._number = 0

    def send(self, name: str, messages: Callable[[], Sequence[bytes]] = tuple) -> None:
        """Rank 0: let the others hear a command. The bulk goes by broadcast, not by the store.

        Args:
            name: of the command.
            messages: makes its arguments; not asked where there are no others.
        """
        if self._group.world_size == 1:
            return
        data = pack(messages())
        self._store.set(self._key(), f"{name} {len(data)}")
        self._number += 1
        self._broadcast(bytearray(data))

    def receive(self) -> tuple[str, list[bytes]]:
        """Other ranks: wait for the next command, for as long as it takes."""
        import torch.distributed as dist

        while True:
            try:
                self._store.wait([self._key()], POLL)
                break
            except dist.DistStoreError:
                continue  # Nothing to do yet. A rank 0 that is gone raises something else.
        name, size = self._store.get(self._key()).decode().split()
        self._number += 1
        return name, unpack(self._broadcast(bytearray(int(size))))

    def _key(self) -> str:
        return f"quartet/command/{self._number}"

    def _broadcast(self, data: bytearray) -> bytes:
        import torch
        import torch.distributed as dist

        if data:
            tensor = torch.frombuffer(data, dtype=torch.uint8)
            dist.broadcast(tensor, src=0, group=self._group.control)
        return bytes(data)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How this process became a rank."""

    rank: int
    world_size: int
    launched: bool
    """True when a launcher (torchrun) has started all ranks."""


def rank_by_launcher() -> int:
    """The rank that a launcher gave this process, or 0."""
    launched = all(name in os.environ for name in LAUNCHER_VARIABLES)
    return int(os.environ["RANK"]) if launched else 0


def launch_of(settings: LearnerSettings) -> Launch:
    """Read a launcher's variables, or plan the ranks that this process is to start.

    Raises:
        ConfigError: more ranks than GPUs, or than the launcher started, or a number that cannot
            be cut into the groups that the settings ask for.
    """
    if all(name in os.environ for name in LAUNCHER_VARIABLES):
        world_size = int(os.environ["WORLD_SIZE"])
        if settings.num_ranks not in (None, world_size):
            raise ConfigError(
                f"learner.num_ranks is {settings.num_ranks}, the launcher started {world_size}",
                field="learner.num_ranks",
                value=str(settings.num_ranks),
                remedy="leave out --learner.num_ranks under a launcher",
            )
        settings.layout(world_size).check()
        return Launch(rank=int(os.environ["RANK"]), world_size=world_size, launched=True)
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks = settings.num_ranks or max(gpus, 1)
    if gpus and ranks > gpus:
        raise ConfigError(
            f"learner.num_ranks is {ranks}, this machine shows {gpus} GPUs",
            field="learner.num_ranks",
            value=str(ranks),
            remedy=f"use at most {gpus}, or start the ranks with torchrun on several machines",
        )
    settings.layout(ranks).check()
    return Launch(rank=0, world_size=ranks, launched=False)


def open_store(launch: Launch) -> Any:
    """The store where the ranks meet. Rank 0 of ranks that it starts binds a free port itself."""
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    if launch.launched:
        store, _, _ = next(iter(rendezvous("env://")))
        return store
    if launch.world_size == 1:
        return dist.HashStore()
    return dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)


class OtherRanks:
    """The processes of ranks 1.. that rank 0 has started on this machine."""

    def __init__(
        self,
        settings: LearnerSettings,
        launch: Launch,
        port: int,
        on_death: Callable[[str, int], None],
    ) -> None:
        """Start them.

        Args:
            settings: handed on.
            launch: this process's place; it is rank 0.
            port: of the store that this process has bound.
            on_death: told in a sentence which rank ended unasked, and the exit code to end with.
        """
        self._on_death = on_death
        self._stopping = threading.Event()
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "quartet_learner.follower"],
                env=os.environ | _rank_environment(rank, launch.world_size, port, settings),
                stdin=subprocess.DEVNULL,
            )
            for rank in range(1, launch.world_size)
        ]
        for rank, process in enumerate(self._processes, start=1):
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()

    def stop(self, timeout: float) -> None:
        """Wait for them to end, `timeout` seconds for all, and end those that do not."""
        self._stopping.set()
        deadline = time.monotonic() + timeout
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def expect_end(self) -> None:
        """From now on an ending rank is in order."""
        self._stopping.set()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if code == ConfigError.exit_code:
            self._stopping.wait(CONFIG_ERROR_GRACE)
        if not self._stopping.is_set():
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            self._on_death(
                f"rank {rank} (process {process.pid}) ended with {how}: the learner stops",
                ConfigError.exit_code if code == ConfigError.exit_code else 1,
            )


def end_process(sentence: str, code: int) -> None:
    """Say one line and end at once: with a rank gone, others may wait in a collective for ever."""
    print(f"quartet learner: {sentence}", file=sys.stderr, flush=True)
    lifetime.leave(code)


def _rank_environment(
    rank: int, world_size: int, port: int, settings: LearnerSettings
) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        SETTINGS_VARIABLE: settings.to_json(),
    }

"""The server's side of one worker process (see `worker`)."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import socket
import struct
import sys
from pathlib import Path
from typing import Any, Self

from quartet.errors import ConfigError, DataError, InfraError
from quartet_reward.process_tree import kill_tree

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 64 << 20
"""Largest answer that is read. A reward is a few bytes; this is a runaway function."""

_LENGTH = struct.Struct(">I")
_LOG_LINE_CHARS = 2000
# What an answer raises that is not what a worker sends; RecursionError: JSON nested too deep.
_UNREADABLE = (ValueError, RecursionError)


class WorkerProcess:
    """A running worker. Takes one call at a time."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        output: asyncio.Task[None],
    ) -> None:
        """Use `start`."""
        self._process = process
        self._reader, self._writer = streams
        self._tasks = (output, asyncio.create_task(self._notice_end()))
        self._is_killed = False
        self._ids = itertools.count()

    @classmethod
    async def start(cls, path: Path, source: str, *, time_limit: float) -> Self:
        """Start a worker and let it load the file.

        Args:
            path: the user's file, absolute.
            source: its text. Workers that are started later run the same text, whatever has become
                of the file since.
            time_limit: seconds the file may take to import.

        Raises:
            ConfigError: the file cannot be loaded.
            InfraError: no process could be started.
        """
        ours, theirs = socket.socketpair()
        read_end, write_end = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-u", "-m", "quartet_reward.worker"),
                *(str(path), str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # its own process group, so that all of it can be killed
                env=worker_environment(os.environ),
            )
        except OSError as error:
            ours.close()
            os.close(read_end)
            raise InfraError(f"cannot start a worker: {error}", reason="WORKER_START") from error
        finally:
            theirs.close()
            os.close(write_end)
        output = asyncio.create_task(_log_output(read_end, process.pid))
        worker = cls(process, await asyncio.open_connection(sock=ours), output)
        try:
            await worker._load(path, source, time_limit)
        except BaseException:
            await worker.kill()
            raise
        return worker

    @property
    def is_alive(self) -> bool:
        """False once the process has ended or was killed."""
        return self._process.returncode is None and not self._is_killed

    @property
    def pid(self) -> int:
        """Process id, also that of its group."""
        return self._process.pid

    async def call(
        self, queries: list[str], prompts: list[str], labels: list[Any], *, time_limit: float
    ) -> Any:
        """Call the function. After a failure that is not an exception of the user's, it is dead.

        Returns:
            What the function returned, as plain JSON values.

        Raises:
            DataError: it raised (USER_EXCEPTION), took too long (TIME_LIMIT), or took the process
                down with it (WORKER_DIED).
        """
        frame = {"queries": queries, "prompts": prompts, "labels": labels}
        try:
            async with asyncio.timeout(time_limit):
                reply = await self._exchange(frame)
        except TimeoutError:
            await self.kill()
            raise DataError(
                f"reward_func took longer than {time_limit:g} s and was killed",
                reason="TIME_LIMIT",
                remedy="make it faster, or raise --reward.timeout",
            ) from None
        except (asyncio.IncompleteReadError, ConnectionError, *_UNREADABLE) as error:
            code = await self.kill()
            how = str(error) if isinstance(error, _UNREADABLE) else f"exit code {code}"
            raise DataError(
                f"the worker process died in reward_func ({how})", reason="WORKER_DIED"
            ) from error
        except BaseException:  # cancelled in mid-call: its late answer must not meet another call
            await self.kill()
            raise
        if "raised" in reply:
            error = DataError(f"reward_func failed: {reply['raised']}", reason="USER_EXCEPTION")
            error.add_note(str(reply["traceback"]))
            raise error
        return reply["answer"]

    async def kill(self) -> int:
        """End the process and all it started; returns its exit code. May be called twice."""
        if not self._is_killed:
            # Also when it has ended by itself: what it started may live on. The guard, which only
            # this ends, has kept the number from becoming another group's.
            self._is_killed = True
            kill_tree(self._process.pid)
        code = await self._process.wait()
        self._writer.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return code

    async def _notice_end(self) -> None:
        """End a pending read when the process ends: its children may keep the socket open."""
        await self._process.wait()
        self._reader.feed_eof()

    async def _load(self, path: Path, source: str, time_limit: float) -> None:
        try:
            async with asyncio.timeout(time_limit):
                reply = await self._exchange({"source": source})
        except TimeoutError:
            raise ConfigError(f"{path} takes longer than {time_limit:g} s to import") from None
        except (asyncio.IncompleteReadError, ConnectionError, *_UNREADABLE):
            code = await self.kill()
            raise ConfigError(f"{path} ends its process when imported (exit code {code})") from None
        if "failed" in reply:
            logger.debug("traceback of %s:\n%s", path, reply.get("traceback", ""))
            raise ConfigError(f"{path}: {reply['failed']}")

    async def _exchange(self, frame: dict[str, Any]) -> dict[str, Any]:
        """Send a frame and read its answer. Raises ValueError for one that is not of this call."""
        call = next(self._ids)
        data = json.dumps({"id": call, **frame}).encode()
        self._writer.write(_LENGTH.pack(len(data)) + data)
        await self._writer.drain()
        size = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))[0]
        if size > MAX_FRAME_BYTES:
            raise ValueError(f"an answer of {size} bytes")
        reply = json.loads(await self._reader.readexactly(size))
        if not isinstance(reply, dict):
            raise ValueError(f"an answer that is a {type(reply).__name__}")
        if (reply.get("id"), reply.get("pid")) != (call, self.pid):
            # User code reached the socket: whose reward this is nobody can tell.
            raise ValueError("an answer that the worker did not give to this call")
        return reply


def worker_environment(environment: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    """The environment of user code: without Quartet's own settings (tokens), with one thread."""
    kept = {name: value for name, value in environment.items() if not name.startswith("QUARTET_")}
    return kept | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


async def _log_output(descriptor: int, pid: int) -> None:
    """Log what the user's code prints, line by line."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb")
    )
    rest = b""
    try:
        while chunk := await reader.read(65536):
            *lines, rest = (rest + chunk).split(b"\n")
            rest = rest[-_LOG_LINE_CHARS:]  # a line without end must not grow without end
            for line in lines:
                _log_line(pid, line)
        if rest:
            _log_line(pid, rest)
    finally:
        transport.close()


def _log_line(pid: int, line: bytes) -> None:
    logger.info("reward worker %d: %s", pid, line[:_LOG_LINE_CHARS].decode(errors="replace"))

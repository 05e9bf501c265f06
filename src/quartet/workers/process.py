"""The side that starts a worker: its life, its output, its end."""

from __future__ import annotations

import ast
import asyncio
import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from quartet.errors import ConfigError, InfraError
from quartet.workers.process_tree import kill_tree

logger = logging.getLogger(__name__)

_LOG_LINE_CHARS = 2000


class UserProcess:
    """A process that runs user code: `python -m MODULE FILE FD` at the other end of a socket."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        output: asyncio.Task[None],
    ) -> None:
        """Use `spawn`."""
        self._process = process
        self.reader, self.writer = streams
        self._tasks = (output, asyncio.create_task(self._notice_end()))
        self._is_killed = False

    @classmethod
    async def spawn(
        cls, module: str, path: Path, *, name: str, descriptors: Sequence[int] = ()
    ) -> Self:
        """Start a process for the user's file.

        Args:
            module: what `python -m` runs.
            path: the user's file, absolute.
            name: what log lines call it, for example "reward worker".
            descriptors: more open files that it gets, named after file and socket.

        Raises:
            InfraError: no process could be started.
        """
        ours, theirs = socket.socketpair()
        read_end, write_end = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-u", "-m", module),
                *(str(path), str(theirs.fileno()), *map(str, descriptors)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                pass_fds=(theirs.fileno(), *descriptors),
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
        output = asyncio.create_task(_log_output(read_end, f"{name} {process.pid}"))
        return cls(process, await asyncio.open_connection(sock=ours), output)

    @property
    def is_alive(self) -> bool:
        """False once the process has ended or was killed."""
        return self._process.returncode is None and not self._is_killed

    @property
    def pid(self) -> int:
        """Process id, also that of its group."""
        return self._process.pid

    async def kill(self) -> int:
        """End the process and all it started; returns its exit code. May be called twice."""
        if not self._is_killed:
            # Also when it has ended by itself: what it started may live on. The guard, which only
            # this ends, has kept the number from becoming another group's.
            self._is_killed = True
            kill_tree(self._process.pid)
        code = await self._process.wait()
        self.writer.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return code

    async def _notice_end(self) -> None:
        """End a pending read when the process ends: its children may keep the socket open."""
        await self._process.wait()
        self.reader.feed_eof()


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of user code: without Quartet's own settings (tokens), with one thread."""
    kept = {name: value for name, value in environment.items() if not name.startswith("QUARTET_")}
    return kept | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def read_source(path: Path, kind: str) -> str:
    """Read a user's file and check all that can be checked without running it.

    Args:
        path: the file.
        kind: what messages call it, for example "reward file".

    Raises:
        ConfigError: it is missing, unreadable, or does not parse.
    """
    try:
        source = path.read_text(encoding="utf-8")
        ast.parse(source, filename=str(path))
    except OSError as error:
        raise ConfigError(f"cannot read the {kind} {path}: {error.strerror}") from error
    except SyntaxError as error:
        place = f"line {error.lineno}" if error.lineno else "unknown line"
        raise ConfigError(f"the {kind} {path} does not parse: {error.msg} ({place})") from error
    except ValueError as error:  # not UTF-8, or a null byte
        raise ConfigError(f"the {kind} {path} is no Python text: {error}") from error
    return source


async def _log_output(descriptor: int, name: str) -> None:
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
                _log_line(name, line)
        if rest:
            _log_line(name, rest)
    finally:
        transport.close()


def _log_line(name: str, line: bytes) -> None:
    logger.info("%s: %s", name, line[:_LOG_LINE_CHARS].decode(errors="replace"))

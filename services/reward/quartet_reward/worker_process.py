"""The server's side of one worker process (see `worker`)."""

from __future__ import annotations

import asyncio
import itertools
import logging
from pathlib import Path
from typing import Any, Self

from quartet.errors import ConfigError, DataError
from quartet.workers import UserProcess, pack_frame, receive_frame

logger = logging.getLogger(__name__)

# What an answer raises that is not what a worker sends; RecursionError: JSON nested too deep.
_UNREADABLE = (ValueError, RecursionError)


class WorkerProcess(UserProcess):
    """A running worker. Takes one call at a time."""

    _ids: itertools.count[int]

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
        worker = await cls.spawn("quartet_reward.worker", path, name="reward worker")
        worker._ids = itertools.count()
        try:
            await worker._load(path, source, time_limit)
        except BaseException:
            await worker.kill()
            raise
        return worker

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
        self.writer.write(pack_frame({"id": call, **frame}))
        await self.writer.drain()
        reply = await receive_frame(self.reader)
        if (reply.get("id"), reply.get("pid")) != (call, self.pid):
            # User code reached the socket: whose reward this is nobody can tell.
            raise ValueError("an answer that the worker did not give to this call")
        return reply

"""The trainer's side of one agent worker (see `worker`): many episodes, each with its own clock.

The clock of an episode stands still while it waits for the policy. So a busy engine costs nobody
an episode, and the limit is on what the user's code takes.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from quartet.agents.episode import Episode, as_json_sampling
from quartet.agents.held import NOBODY, Page, new_page
from quartet.errors import ConfigError, DataError, InfraError
from quartet.workers import UserProcess, pack_frame, receive_frame

logger = logging.getLogger(__name__)

GRACE_SECONDS = 2.0
"""An episode whose time is over may take so long to end; a worker that lets it not is killed."""

_UNREADABLE = (ValueError, KeyError, TypeError, RecursionError)

Answer = Callable[[int, dict[str, Any]], Awaitable[dict[str, Any]]]
"""From the number of a call in its episode and what is wanted to a completion.

Raises DataError for what the agent may hear of, and anything else for what ends the run."""


class WorkerLostError(InfraError):
    """The worker ended under an episode that is not to blame: play it again."""


@dataclass(slots=True, eq=False)
class _Running:
    """An episode that is being played."""

    answer: Answer
    clock: asyncio.Timeout
    time_limit: float
    done: asyncio.Future[dict[str, Any]]
    left: float
    """Seconds left when the clock was stopped last."""
    num_calls: int = 0
    num_waiting: int = 0
    calls: set[asyncio.Task[None]] = field(default_factory=set)

    def stop_clock(self) -> None:
        """One more call waits for the policy."""
        when = self.clock.when()
        if self.num_waiting == 0 and when is not None and not self.clock.expired():
            self.left = max(0.0, when - asyncio.get_running_loop().time())
            self.clock.reschedule(None)
        self.num_waiting += 1

    def start_clock(self) -> None:
        """A call was answered; with the last one the user's code goes on."""
        self.num_waiting -= 1
        if self.num_waiting == 0 and not self.clock.expired() and not self.done.done():
            self.clock.reschedule(asyncio.get_running_loop().time() + self.left)


class AgentProcess(UserProcess):
    """A running agent worker."""

    _page: Page
    _numbers: itertools.count[int]
    _running: dict[int, _Running]
    _frames: asyncio.Task[None]
    _blamed: set[int]

    @classmethod
    async def start(
        cls, path: Path, source: str, tokenizer: dict[str, Any], *, time_limit: float
    ) -> Self:
        """Start a worker and let it load file and tokenizer.

        Args:
            path: the user's file, absolute.
            source: its text. Workers that are started later run the same text.
            tokenizer: arguments of the worker's `_load_tokenizer`.
            time_limit: seconds that this may take.

        Raises:
            ConfigError: the file is no agent.
            InfraError: no process could be started.
        """
        page = new_page()
        try:
            worker = await cls.spawn(
                "quartet.agents.worker", path, name="agent worker", descriptors=(page,)
            )
            worker._page = Page(page)
        finally:
            os.close(page)
        worker._running = {}
        worker._blamed = set()
        worker._numbers = itertools.count(NOBODY + 1)
        try:
            await worker._load(path, source, tokenizer, time_limit)
        except BaseException:
            await worker.kill()
            raise
        worker._frames = asyncio.create_task(worker._read())
        return worker

    async def _load(
        self, path: Path, source: str, tokenizer: dict[str, Any], time_limit: float
    ) -> None:
        try:
            async with asyncio.timeout(time_limit):
                self.writer.write(pack_frame({"source": source, "tokenizer": tokenizer}))
                reply = await receive_frame(self.reader)
        except TimeoutError:
            raise ConfigError(f"{path} takes longer than {time_limit:g} s to load") from None
        except (asyncio.IncompleteReadError, ConnectionError, *_UNREADABLE):
            code = await self.kill()
            raise ConfigError(f"{path} ends its process when imported (exit code {code})") from None
        if reply.get("pid") != self.pid or "ready" not in reply:
            logger.debug("traceback of %s:\n%s", path, reply.get("traceback", ""))
            raise ConfigError(f"{path}: {reply.get('failed', 'did not load')}")

    async def play(self, episode: Episode, answer: Answer, *, time_limit: float) -> dict[str, Any]:
        """Have one sample made.

        Returns:
            What `execute` returned, as plain JSON values.

        Raises:
            DataError: it raised (ERROR), took too long (TIMEOUT), or took the process down with it
                (WORKER_DIED).
            WorkerLostError: another episode did.
            QuartetError: what `answer` raised.
        """
        number = next(self._numbers)
        done: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        running: _Running | None = None
        try:
            async with asyncio.timeout(time_limit) as clock:
                running = _Running(answer, clock, time_limit, done, left=time_limit)
                self._running[number] = running
                self._send(
                    {
                        "episode": number,
                        "prompt": episode.prompt,
                        "label": episode.label,
                        "sampling": as_json_sampling(episode.sampling),
                        "max_length": episode.max_length,
                    }
                )
                return await asyncio.shield(done)
        except TimeoutError:
            if running is None or not running.clock.expired():
                raise  # the policy's, not ours
            await self._end(number, done, time_limit)
            raise DataError(
                f"the agent took longer than {time_limit:g} s, waiting for the policy not counted",
                reason="TIMEOUT",
                remedy="make it faster, or raise --train.agent_timeout",
            ) from None
        finally:
            self._send({"cancel": number})
            for call in running.calls if running else ():
                call.cancel()
            self._running.pop(number, None)
            done.cancel()

    async def _end(self, number: int, done: asyncio.Future[Any], time_limit: float) -> None:
        """Have an episode end whose time is over; a worker that does not let it is killed.

        Raises:
            WorkerLostError: it could not end because another episode blocked the worker.
        """
        self._send({"cancel": number})
        await asyncio.wait({done}, timeout=GRACE_SECONDS)
        if not done.done() and self._page.holder in self._running.keys() - {number}:
            # Somebody else blocks the worker, and has time left to do so.
            await asyncio.wait({done}, timeout=time_limit)
        if not done.done():
            self._blamed |= {number, self._page.holder}
            logger.warning("agent worker %d lets no episode end and is killed", self.pid)
            await self.kill()
        error = None if done.cancelled() else done.exception()
        if isinstance(error, WorkerLostError):
            raise error

    async def kill(self) -> int:
        """End the process and all it started, and every episode in it."""
        holder = self._page.holder
        code = await super().kill()
        frames = getattr(self, "_frames", None)
        if frames is not None and frames is not asyncio.current_task():
            frames.cancel()
        self._lose(holder, f"exit code {code}")
        return code

    def _lose(self, holder: int, how: str) -> None:
        """Fail what was being played; who held the worker when it died is to blame."""
        for number, running in list(self._running.items()):
            if running.done.done():
                continue
            if number in self._blamed:
                reason, what = "TIMEOUT", "took too long and let its worker do nothing else"
                running.done.set_exception(DataError(f"the agent {what}", reason=reason))
            elif number == holder:
                error = DataError(f"the agent's worker died in it ({how})", reason="WORKER_DIED")
                running.done.set_exception(error)
            else:
                lost = WorkerLostError(f"an agent worker died ({how})", reason="WORKER_LOST")
                running.done.set_exception(lost)
            running.done.exception()  # retrieved, also where nobody waits any more

    async def _read(self) -> None:
        """Take the worker's frames until it ends."""
        try:
            while True:
                self._take(await receive_frame(self.reader))
        except (asyncio.IncompleteReadError, ConnectionError):
            how = "ended"
        except _UNREADABLE as error:
            how = f"sent what is no frame: {error}"
        if not self._is_killed:
            logger.warning("agent worker %d %s", self.pid, how)
        await self.kill()

    def _take(self, frame: dict[str, Any]) -> None:
        if frame["pid"] != self.pid:
            raise ValueError("a frame of another process")
        running = self._running.get(frame["episode"])
        if running is None or running.done.done():
            return  # its time was over
        if "generate" in frame:
            call = asyncio.create_task(self._answer(running, frame))
            running.calls.add(call)
            call.add_done_callback(running.calls.discard)
        elif "raised" in frame:
            error = DataError(f"the agent failed: {frame['raised']}", reason="ERROR")
            error.add_note(str(frame["traceback"]))
            running.done.set_exception(error)
        else:
            running.done.set_result(frame["result"])

    async def _answer(self, running: _Running, frame: dict[str, Any]) -> None:
        """Have a prompt completed for an episode."""
        address = {"episode": frame["episode"], "call": frame["call"]}
        number = running.num_calls
        running.num_calls += 1
        running.stop_clock()
        try:
            completion = await running.answer(number, frame["generate"])
        except DataError as error:
            self._send({**address, "refused": str(error)})
        except Exception as error:  # the policy cannot be asked: the agent has no part in it
            if not running.done.done():
                running.done.set_exception(error)
        else:
            self._send({**address, "completion": completion})
        finally:
            running.start_clock()

    def _send(self, frame: dict[str, Any]) -> None:
        if self.is_alive and not self.writer.is_closing():
            self.writer.write(pack_frame(frame))

"""When the fake rollout service may begin, and go on with, a completion."""

from __future__ import annotations

import asyncio

from quartet.types import PauseMode


class Gate:
    """Lets calls in, and completions on to their next token."""

    def __init__(self) -> None:
        self._open, self._free, self._empty = asyncio.Event(), asyncio.Event(), asyncio.Event()
        for event in (self._open, self._free, self._empty):
            event.set()
        self._num_aborts = 0

    async def close(self, mode: PauseMode) -> None:
        """Hold calls; hold or end completions, or wait for their end."""
        self._open.clear()
        if mode is PauseMode.DRAIN:
            await self._empty.wait()
            return
        self._num_aborts += mode is PauseMode.ABORT
        if mode is PauseMode.KEEP:
            self._free.clear()

    def open(self) -> None:
        """Go on."""
        self._open.set()
        self._free.set()

    def is_empty(self, empty: bool) -> None:
        """Say whether any completion runs."""
        (self._empty.set if empty else self._empty.clear)()

    async def opened(self) -> None:
        """Wait until calls may begin."""
        await self._open.wait()

    async def emptied(self) -> None:
        """Wait until nothing runs."""
        await self._empty.wait()

    async def passed(self, seconds: float, *, has_begun: bool) -> bool:
        """Spend the time of a token, and wait while held; False when it is not to be made.

        What has no token yet is not ended by a pause: it waits, like a call that comes.
        """
        aborts = self._num_aborts
        if seconds:
            await asyncio.sleep(seconds)
        await self._free.wait()
        was_ended = aborts != self._num_aborts
        if was_ended and not has_begun:
            await self._open.wait()
        return not (was_ended and has_begun)

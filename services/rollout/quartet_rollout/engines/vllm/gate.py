"""Who may be in the engine: many calls, or one alone, or nobody. Belongs to one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Gate:
    """A door with a count of who is inside.

    A call that must be alone waits until all others have left, and lets nobody in after it came.
    """

    def __init__(self) -> None:
        self._is_open = True
        self._inside = 0
        self._waiting_alone = 0
        self._is_taken = False
        self._changed = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """False while nobody gets in."""
        return self._is_open

    @asynccontextmanager
    async def enter(self, *, alone: bool) -> AsyncIterator[None]:
        """Wait for the door, be inside for the block."""
        if alone:
            self._waiting_alone += 1
        try:
            await self._until(lambda: self._lets_in(alone=alone))
        finally:
            if alone:
                self._waiting_alone -= 1
                self._change()
        self._inside += 1
        self._is_taken = alone
        try:
            yield
        finally:
            self._inside -= 1
            self._is_taken = False
            self._change()

    def close(self) -> None:
        """Let nobody in any more."""
        self._is_open = False
        self._change()

    def open(self) -> None:
        """Let calls in again."""
        self._is_open = True
        self._change()

    async def empty(self) -> None:
        """Wait until nobody is inside, or the door is open again."""
        await self._until(lambda: self._inside == 0 or self._is_open)

    def _lets_in(self, *, alone: bool) -> bool:
        if not self._is_open or self._is_taken:
            return False
        return self._inside == 0 if alone else self._waiting_alone == 0

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    def _change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

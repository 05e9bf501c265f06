"""Any server of OpenAI's completions that returns token ids, as a rollout engine.

http.py     calls of the server, streams of completions, their errors
sample.py   one sample: what the server is asked for, and what its answers add up to
flights.py  requests under way, and what ends them early
probe.py    what a server can, found out by asking it
weights.py  how new weights reach a server
doors.py    which of these ways a server has
folder.py   weights as a model folder
watch.py    whether the server is there, and still the same
worker.py   what runs inside the workers of vLLM's own server
engine.py   the Engine that the room sees
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from quartet.config import RolloutServeConfig
    from quartet_rollout.engine import Engine

__all__ = ["open_engine"]


def open_engine(config: RolloutServeConfig) -> AbstractAsyncContextManager[Engine]:
    """See `engine.py`. Imported when it is called: worker.py is imported where nothing else is."""
    from quartet_rollout.engines.openai import engine

    return engine.open_engine(config)

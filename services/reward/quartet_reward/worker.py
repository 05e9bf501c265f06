"""The process in which a user's reward file runs: `python -m quartet_reward.worker FILE FD`.

The function runs in the main thread, where `signal.alarm` and the like work. Every frame to the
worker (`quartet.workers.frames`) has an "id", and its answer has the same "id" and the "pid" of the
process that wrote it, so that no answer can be taken for another's.

    <- {"source": str}                                 the file as its server read it
    -> {"ready": true}  or  {"failed": str}            the function can be called, or why not
    <- {"queries": [..], "prompts": [..], "labels": [..]}
    -> {"answer": {...}}  or  {"raised": str, "traceback": str}

A child that user code forks ends where user code ends: it neither answers nor reads a frame.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quartet.workers.child import end_if_forked, load_module, open_channel, plain, summary
from quartet.workers.frames import read_frame, write_frame

RewardFunc = Callable[..., Any]


def main(arguments: list[str]) -> int:
    """Serve the function until the server hangs up. Returns the exit code."""
    path, channel = Path(arguments[0]), open_channel(int(arguments[1]))
    source = read_frame(channel)
    if source is None:
        return 0
    pid = os.getpid()
    try:
        function = load_reward_func(path, source["source"])
    except BaseException as error:
        end_if_forked(pid, error)
        failed = {"failed": summary(error, path), "traceback": traceback.format_exc()}
        _reply(channel, source, failed)
        return 1
    end_if_forked(pid)
    _reply(channel, source, {"ready": True})
    _serve(channel, function, path)
    return 0


def _serve(channel: socket.socket, function: RewardFunc, path: Path) -> None:
    with asyncio.Runner() as runner:
        while (frame := read_frame(channel)) is not None:
            _reply(channel, frame, _answer(function, frame, path, runner))


def _reply(channel: socket.socket, frame: dict[str, Any], answer: dict[str, Any]) -> None:
    write_frame(channel, {"id": frame["id"], "pid": os.getpid(), **answer})


def _answer(
    function: RewardFunc, frame: dict[str, Any], path: Path, runner: asyncio.Runner
) -> dict[str, Any]:
    pid = os.getpid()
    try:
        answer = function(frame["queries"], frame["prompts"], frame["labels"])
        if inspect.isawaitable(answer):
            answer = runner.run(_wait_for(answer))
        end_if_forked(pid)
        if not isinstance(answer, dict):
            raise TypeError(f"reward_func returned a {type(answer).__name__}, not a dict")
        return {"answer": plain(answer)}
    except BaseException as error:  # SystemExit of a user's file must not end the worker
        end_if_forked(pid, error)
        return {"raised": summary(error, path), "traceback": traceback.format_exc()}


async def _wait_for(answer: Any) -> Any:
    return await answer


def load_reward_func(path: Path, source: str) -> RewardFunc:
    """Run the file as a module and take its `reward_func`.

    Raises:
        TypeError: the file defines no such function.
        BaseException: whatever the file raises while it is imported.
    """
    function = getattr(load_module(path, source), "reward_func", None)
    if not callable(function):
        raise TypeError("defines no function reward_func(queries, prompts, labels, **kwargs)")
    return function


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

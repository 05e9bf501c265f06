"""The process in which a user's reward file runs: `python -m quartet_reward.worker FILE FD`.

Only the standard library is imported here, so a worker costs what the user's file costs. The
function runs in the main thread, where `signal.alarm` and the like work. Frames come and go over
one socket: four bytes of length (big-endian), then JSON. Every frame to the worker has an "id", and
its answer has the same "id" and the "pid" of the process that wrote it, so that no answer can be
taken for another's.

    <- {"source": str}                                 the file as its server read it
    -> {"ready": true}  or  {"failed": str}            the function can be called, or why not
    <- {"queries": [..], "prompts": [..], "labels": [..]}
    -> {"answer": {...}}  or  {"raised": str, "traceback": str}

A child that user code forks ends where user code ends: it neither answers nor reads a frame.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import os
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_LENGTH = struct.Struct(">I")

RewardFunc = Callable[..., Any]


def main(arguments: list[str]) -> int:
    """Serve the function until the server hangs up. Returns the exit code."""
    path, descriptor = Path(arguments[0]), int(arguments[1])
    channel = socket.socket(fileno=descriptor)
    channel.set_inheritable(False)  # programs that user code starts have no business with it
    _start_guard(channel)
    source = read_frame(channel)
    if source is None:
        return 0
    pid = os.getpid()
    try:
        function = load_reward_func(path, source["source"])
    except BaseException as error:
        _end_if_forked(pid, error)
        failed = {"failed": _summary(error, path), "traceback": traceback.format_exc()}
        _reply(channel, source, failed)
        return 1
    _end_if_forked(pid)
    _reply(channel, source, {"ready": True})
    _serve(channel, function, path)
    return 0


def _serve(channel: socket.socket, function: RewardFunc, path: Path) -> None:
    with asyncio.Runner() as runner:
        while (frame := read_frame(channel)) is not None:
            _reply(channel, frame, _answer(function, frame, path, runner))


def _reply(channel: socket.socket, frame: dict[str, Any], answer: dict[str, Any]) -> None:
    write_frame(channel, {"id": frame["id"], "pid": os.getpid(), **answer})


def _end_if_forked(worker_pid: int, error: BaseException | None = None) -> None:
    """End a child that came back from user code, with the exit code of a Python program."""
    if os.getpid() == worker_pid:
        return
    if isinstance(error, SystemExit):
        code = error.code
        os._exit(code if isinstance(code, int) else int(code is not None))
    if error is not None:
        traceback.print_exception(error)
    os._exit(int(error is not None))


def _start_guard(channel: socket.socket) -> None:
    """Leave a process behind that ends this group as soon as the server is gone.

    The worker cannot do it: user code may be stuck in C with the interpreter's lock held (one bad
    regular expression is enough), and PR_SET_PDEATHSIG would end the worker alone and leave what
    it started. The guard is no child of the worker, so user code that waits for all its children
    does not wait for it.
    """
    between = os.fork()  # nothing but the standard library is loaded, and there is one thread
    if between:
        os.waitpid(between, 0)
        return
    if os.fork():
        os._exit(0)
    gone = select.poll()
    gone.register(channel, getattr(select, "POLLRDHUP", select.POLLHUP))
    gone.poll()
    os.killpg(0, signal.SIGKILL)


def _answer(
    function: RewardFunc, frame: dict[str, Any], path: Path, runner: asyncio.Runner
) -> dict[str, Any]:
    pid = os.getpid()
    try:
        answer = function(frame["queries"], frame["prompts"], frame["labels"])
        if inspect.isawaitable(answer):
            answer = runner.run(_wait_for(answer))
        _end_if_forked(pid)
        if not isinstance(answer, dict):
            raise TypeError(f"reward_func returned a {type(answer).__name__}, not a dict")
        return {"answer": plain(answer)}
    except BaseException as error:  # SystemExit of a user's file must not end the worker
        _end_if_forked(pid, error)
        return {"raised": _summary(error, path), "traceback": traceback.format_exc()}


async def _wait_for(answer: Any) -> Any:
    return await answer


def load_reward_func(path: Path, source: str) -> RewardFunc:
    """Run the file as a module and take its `reward_func`.

    Raises:
        TypeError: the file defines no such function.
        BaseException: whatever the file raises while it is imported.
    """
    name = path.stem
    if name in sys.modules or name in sys.stdlib_module_names:
        name = f"quartet_user_{name}"
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise TypeError("is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look modules up by name
    exec(compile(source, str(path), "exec"), module.__dict__)
    function = getattr(module, "reward_func", None)
    if not callable(function):
        raise TypeError("defines no function reward_func(queries, prompts, labels, **kwargs)")
    return function


def plain(value: Any) -> Any:
    """Make JSON values of what reward functions return; tensors and arrays become lists.

    What has no number in it becomes `<Type>`, which the reader refuses by name.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # torch.Tensor, numpy.ndarray and their scalars
        return plain(value.tolist())
    if hasattr(value, "__float__"):  # Fraction, Decimal, sympy numbers
        return float(value)
    return f"<{type(value).__name__}>"


def _summary(error: BaseException, path: Path) -> str:
    """One line: the exception, and the last place in the user's file that it came through."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    if isinstance(error, SyntaxError):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    places = [frame for frame in frames if frame.filename == str(path)]
    if not places:
        return text
    return f"{text} ({path.name}:{places[-1].lineno}, in {places[-1].name})"


def write_frame(channel: socket.socket, frame: dict[str, Any]) -> None:
    """Send one frame."""
    data = json.dumps(frame).encode()
    channel.sendall(_LENGTH.pack(len(data)) + data)


def read_frame(channel: socket.socket) -> dict[str, Any] | None:
    """Receive one frame; None when the other side has hung up."""
    header = _read_exactly(channel, _LENGTH.size)
    if header is None:
        return None
    data = _read_exactly(channel, _LENGTH.unpack(header)[0])
    return None if data is None else json.loads(data)


def _read_exactly(channel: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        try:
            piece = channel.recv(size - len(data))
        except ConnectionError:
            return None
        if not piece:
            return None
        data += piece
    return bytes(data)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

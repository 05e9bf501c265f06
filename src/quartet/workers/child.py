"""The worker's side: how a process for user code begins, loads the file, and speaks of errors.

Only the standard library is imported here, so a worker costs what the user's file costs.
"""

from __future__ import annotations

import importlib.util
import os
import select
import signal
import socket
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any


def open_channel(descriptor: int) -> socket.socket:
    """The socket that the worker was started with. To be called once, before user code runs."""
    channel = socket.socket(fileno=descriptor)
    channel.set_inheritable(False)  # programs that user code starts have no business with it
    _start_guard(channel)
    return channel


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


def load_module(path: Path, source: str) -> ModuleType:
    """Run the text of a file as the module of its name.

    Raises:
        TypeError: it is no Python file.
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
    return module


def end_if_forked(worker_pid: int, error: BaseException | None = None) -> None:
    """End a child that came back from user code, with the exit code of a Python program."""
    if os.getpid() == worker_pid:
        return
    if isinstance(error, SystemExit):
        code = error.code
        os._exit(code if isinstance(code, int) else int(code is not None))
    if error is not None:
        traceback.print_exception(error)
    os._exit(int(error is not None))


def summary(error: BaseException, path: Path) -> str:
    """One line: the exception, and the last place in the user's file that it came through."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    if isinstance(error, SyntaxError):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    places = [frame for frame in frames if frame.filename == str(path)]
    if not places:
        return text
    return f"{text} ({path.name}:{places[-1].lineno}, in {places[-1].name})"


def plain(value: Any) -> Any:
    """Make JSON values of what user code returns; tensors and arrays become lists.

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

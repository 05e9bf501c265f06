"""`python -m benchmarks.recording train ppo ...`: the `quartet` command, with its calls on record.

Every message that a client of this process, or of a service that it starts, sends or receives is
written to a file, as the bytes that were on the wire anyway: nothing is serialised twice, so that
the run costs what it costs without a recording. The product has no part in this: the channels of
its clients are replaced from outside.

One file a process: for each message a line of JSON, then as many bytes as it says.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "BENCHMARK_RECORDING_FOLDER"
"""Environment variable with the folder that recordings go to; it must exist."""


@dataclass(kw_only=True, slots=True, eq=False)
class Call:
    """One recorded call. Times are in seconds of the machine's monotonic clock."""

    method: str
    """Path of the method: /quartet.api.rollout.v1.RolloutService/Generate."""
    began: float
    """When its first request was sent."""
    ended: float
    """When its last message was sent or received."""
    requests: list[bytes] = field(default_factory=list)
    """Messages sent, in order."""
    responses: list[bytes] = field(default_factory=list)
    """Messages received, in order."""

    @property
    def num_bytes(self) -> int:
        """Size of all messages."""
        return sum(map(len, self.requests)) + sum(map(len, self.responses))


class Recorder:
    """Appends the messages of one process to a file."""

    def __init__(self, path: Path) -> None:
        """Write to `path`. Unbuffered: services end without closing their files."""
        self._file = path.open("ab", buffering=0)
        self._numbers = count()

    def new_call(self) -> int:
        """Number of a call that begins now."""
        return next(self._numbers)

    def write(self, call: int, method: str, body: bytes, *, is_request: bool) -> None:
        """Keep one message."""
        head = {
            "call": call,
            "method": method,
            "time": time.monotonic(),
            "request": is_request,
            "size": len(body),
        }
        self._file.write(json.dumps(head).encode() + b"\n" + body)


class RecordingChannel:
    """A channel whose stubs record; everything else is the channel's own."""

    def __init__(self, channel: Any, recorder: Recorder) -> None:
        """Wrap `channel`, a grpc.aio.Channel."""
        self._channel = channel
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        """What a stub asks for is wrapped, the rest is passed through."""
        attribute = getattr(self._channel, name)
        if name in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            return lambda method, *serializers, **more: self._recorded(
                attribute, method, *serializers, **more
            )
        return attribute

    def _recorded(
        self,
        make: Callable[..., Any],
        method: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        **more: Any,
    ) -> Callable[..., Any]:
        """A method whose every call has serializers of its own, which know the call."""
        recorder = self._recorder

        def call(*args: Any, **kwargs: Any) -> Any:
            number = recorder.new_call()

            def serialize(message: Any) -> bytes:
                body = request_serializer(message)
                recorder.write(number, method, body, is_request=True)
                return body

            def deserialize(body: bytes) -> Any:
                recorder.write(number, method, body, is_request=False)
                return response_deserializer(body)

            bound = make(
                method, request_serializer=serialize, response_deserializer=deserialize, **more
            )
            return bound(*args, **kwargs)

        return call


def read_calls(folder: Path) -> list[Call]:
    """All calls of all processes, in the order in which they began."""
    calls: dict[tuple[str, int], Call] = {}
    for path in sorted(folder.glob("*.calls")):
        for head, body in _messages(path):
            key, now = (path.name, head["call"]), head["time"]
            if key not in calls:
                calls[key] = Call(method=head["method"], began=now, ended=now)
            call = calls[key]
            call.ended = now
            (call.requests if head["request"] else call.responses).append(body)
    return sorted(calls.values(), key=lambda call: call.began)


def calls_of_steps(calls: Sequence[Call], first: int, last: int) -> list[Call]:
    """Calls of the PPO steps `first` to `last`, which count from 1.

    Nothing is under way when a step's push is answered, and the push before the first step ends
    what went before it: so the answers of the pushes are the borders.

    Raises:
        RuntimeError: the recording ends before step `last` does.
    """
    pushes = [call.ended for call in calls if call.method.endswith("/PushWeights")]
    if len(pushes) <= last:
        raise RuntimeError(f"the recording has {len(pushes)} pushes, and no end of step {last}")
    return [call for call in calls if pushes[first - 1] < call.began < pushes[last]]


def _messages(path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Head and body of each message; one that was cut off by the end of its process is left out."""
    with path.open("rb") as file:
        while (line := file.readline()).endswith(b"\n"):
            head = json.loads(line)
            body = file.read(head["size"])
            if len(body) == head["size"]:
                yield head, body


def install(folder: Path) -> None:
    """Record the clients of this process, and have the services that it starts do the same."""
    from quartet.clients import base
    from quartet.trainer import launch

    recorder = Recorder(folder / f"{os.getpid()}.calls")
    create_channel, serve_command = base.create_channel, launch.serve_command

    def recording_channel(*args: Any, **kwargs: Any) -> Any:
        return RecordingChannel(create_channel(*args, **kwargs), recorder)

    def recording_command(*args: Any) -> list[str]:
        command = serve_command(*args)
        place = command.index("quartet")
        return [*command[:place], "benchmarks.recording", *command[place + 1 :]]

    base.create_channel = recording_channel
    launch.serve_command = recording_command


def main(argv: Sequence[str]) -> int:
    """Run `quartet` with the given arguments."""
    from quartet.cli import main as quartet

    install(Path(os.environ[FOLDER_VARIABLE]))
    return quartet(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

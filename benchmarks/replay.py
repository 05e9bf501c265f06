"""Makes recorded calls again, against a server that has the recorded answers ready.

Client, codec, server, interceptors and servicers are the product's own; only what the rooms would
compute is missing. So what is left of a call is what gRPC costs.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle
from multiprocessing.connection import Connection
from typing import Any

from quartet_learner.servicer import LearnerServicer
from quartet_ref.servicer import RefServicer
from quartet_reward.servicer import RewardServicer
from quartet_rollout.servicer import RolloutServicer

from benchmarks.methods import METHODS, Method
from benchmarks.processes import cpu_seconds
from benchmarks.recording import Call
from quartet.api.learner.v1 import learner_service_pb2_grpc as learner_grpc
from quartet.api.ref.v1 import ref_service_pb2_grpc as ref_grpc
from quartet.api.reward.v1 import reward_service_pb2_grpc as reward_grpc
from quartet.api.rollout.v1 import rollout_service_pb2_grpc as rollout_grpc
from quartet.testing.loopback import loopback

START_SECONDS = 60.0
"""How long the answering process may take to import and bind."""

ENOUGH_CPU_SECONDS = 0.5
"""CPU time to spend on one method: 50 ticks of the clock that is read."""

ENOUGH_SECONDS = 8.0
"""No more time than this on one method, however little the machine gives us."""

Answers = Mapping[str, Sequence[bytes]]
"""Recorded responses by the path of their method, in the order of the calls."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What all recorded calls of one method cost when they are made once."""

    method: Method
    num_calls: int
    num_bytes: int
    cpu_seconds: float
    """Of both sides together."""


class AnsweringRoom:
    """All four rooms at once, as their servicers see them; knows the answers by heart.

    The n-th call of a method gets the n-th recorded answer, and after the last the first again:
    so calls must come one after the other, in the recorded order.
    """

    def __init__(self, answers: Answers) -> None:
        """Decode the answers; encoding them again is part of every call."""
        methods = {method.path: method for method in METHODS}
        self._answers: dict[str, Iterator[Any]] = {
            methods[path].label: cycle(methods[path].responses(bodies))
            for path, bodies in answers.items()
        }

    async def generate(self, request: object) -> Any:
        """RolloutRoom.generate."""
        return next(self._answers["rollout.Generate"])

    async def prepare(self, request: object) -> Any:
        """RolloutRoom.prepare."""
        return next(self._answers["rollout.PrepareWeights"])

    async def receive(self, request: object) -> AsyncIterator[Any]:
        """RolloutRoom.receive: events up to the one that ends a transfer."""
        while True:
            event = next(self._answers["rollout.ReceiveWeights"])
            yield event
            if event.event in ("done", "failed"):
                return

    async def commit(self, request: object) -> Any:
        """RolloutRoom.commit."""
        return next(self._answers["rollout.CommitWeights"])

    async def score(self, request: object) -> Any:
        """RewardRoom.score."""
        return next(self._answers["reward.Score"])

    async def compute(self, request: object) -> Any:
        """RefModel.compute; the servicer itself puts the chunk's id to the numbers."""
        _, logprobs = next(self._answers["ref.ComputeLogprobs"])
        return logprobs

    async def forward(self, requests: AsyncIterator[object]) -> AsyncIterator[Any]:
        """LearnerRoom.forward."""
        async for _ in requests:
            yield next(self._answers["learner.Forward"])

    async def train(self, step: object, parts: object) -> Any:
        """LearnerRoom.train."""
        return next(self._answers["learner.Train"])

    async def push_weights(self, request: object) -> Any:
        """LearnerRoom.push_weights."""
        return next(self._answers["learner.PushWeights"])


class AnsweringService:
    """One room's gRPC door with an AnsweringRoom behind it."""

    def __init__(self, name: str, add: Any, servicer: Any) -> None:
        """Serve `servicer`, which the generated function `add` puts into a server."""
        self.name = name
        self.replica = f"{name}-replay"
        self._add = add
        self._servicer = servicer

    def register(self, server: Any) -> str:
        """Add the servicer; returns the full name of the gRPC service."""
        self._add(self._servicer, server)
        return f"quartet.api.{self.name}.v1.{self.name.title()}Service"

    async def start(self) -> None:
        """Nothing is to be loaded."""

    async def stop(self) -> None:
        """Nothing is held."""


def _services(room: Any) -> list[AnsweringService]:
    return [
        AnsweringService(
            "rollout", rollout_grpc.add_RolloutServiceServicer_to_server, RolloutServicer(room)
        ),
        AnsweringService(
            "reward", reward_grpc.add_RewardServiceServicer_to_server, RewardServicer(room)
        ),
        AnsweringService(
            "ref", ref_grpc.add_RefServiceServicer_to_server, RefServicer(room, replica="replay")
        ),
        AnsweringService(
            "learner", learner_grpc.add_LearnerServiceServicer_to_server, LearnerServicer(room)
        ),
    ]


def serve(answers: Answers, pipe: Connection) -> None:
    """Body of the answering process: send the addresses by room, then serve until `pipe` closes."""
    asyncio.run(_serve(answers, pipe))


async def _serve(answers: Answers, pipe: Connection) -> None:
    async with AsyncExitStack() as stack:
        addresses = {
            service.name: await stack.enter_async_context(loopback(service))
            for service in _services(AnsweringRoom(answers))
        }
        pipe.send(addresses)
        # It is readable when the other side has closed it, also by dying.
        await asyncio.to_thread(pipe.poll, None)


@contextmanager
def answering(answers: Answers) -> Iterator[tuple[int, dict[str, str]]]:
    """Run the answering process; yields its pid and the addresses by room.

    Raises:
        RuntimeError: it did not come up.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(answers, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(START_SECONDS):
            raise RuntimeError(f"the answering process was silent for {START_SECONDS:g} s")
        yield process.pid or 0, ours.recv()
    except EOFError:
        raise RuntimeError("the answering process ended early; its error is above") from None
    finally:
        ours.close()
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()


def replay(calls: Sequence[Call]) -> list[Cost]:
    """Measure what recorded calls cost, method by method, in the order of METHODS.

    Raises:
        RuntimeError: a call of a method without a row, or one that has no answer.
    """
    by_path: dict[str, list[Call]] = {}
    for call in calls:
        by_path.setdefault(call.method, []).append(call)
    _check(by_path)
    answers = {
        path: [body for call in made for body in call.responses] for path, made in by_path.items()
    }
    with answering(answers) as (pid, addresses):
        return asyncio.run(_measure_all(by_path, pid, addresses))


def _check(by_path: Mapping[str, Sequence[Call]]) -> None:
    unknown = set(by_path) - {method.path for method in METHODS}
    if unknown:
        raise RuntimeError(f"benchmarks/methods.py has no row for {', '.join(sorted(unknown))}")
    for path, calls in by_path.items():
        if any(not call.responses for call in calls):
            raise RuntimeError(f"a recorded call of {path} has no answer")


async def _measure_all(
    by_path: Mapping[str, Sequence[Call]], pid: int, addresses: Mapping[str, str]
) -> list[Cost]:
    return [
        await _measure(method, by_path[method.path], pid, addresses[method.client.room])
        for method in METHODS
        if method.path in by_path
    ]


async def _measure(method: Method, calls: Sequence[Call], pid: int, address: str) -> Cost:
    """Make the calls again and again until their cost is known well enough."""
    requests = [method.requests(call.requests) for call in calls]

    async def play(client: Any) -> None:
        # One after the other: together they would cost a little less, and not be in order.
        for each in requests:
            await method.play(client, each)

    async with method.client(address) as client:
        await client.wait_ready(START_SECONDS)
        await play(client)
        clock = asyncio.get_running_loop().time
        began, before, rounds, spent = clock(), _both(pid), 0, 0.0
        while rounds < 3 or (spent < ENOUGH_CPU_SECONDS and clock() - began < ENOUGH_SECONDS):
            await play(client)
            rounds += 1
            spent = _both(pid) - before
    return Cost(
        method=method,
        num_calls=len(calls),
        num_bytes=sum(call.num_bytes for call in calls),
        cpu_seconds=spent / rounds,
    )


def _both(pid: int) -> float:
    """CPU seconds of this process and the answering one."""
    return cpu_seconds(os.getpid()) + cpu_seconds(pid)

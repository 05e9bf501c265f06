"""What the clients share: one channel, deadlines, bounded calls, errors with the server's name."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, ClassVar, Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quartet.config.rpc import RpcConfig
from quartet.errors import ConfigError, FatalError, InfraError, RequestError, UnavailableError
from quartet.rpc import errors, policy
from quartet.rpc.channel import create_channel

Value = TypeVar("Value")
_RECONNECT_SECONDS = 0.2


def new_request_id() -> str:
    """A request_id nobody else has."""
    return uuid.uuid4().hex


class Client:
    """Calls one service at one address. Belongs to the event loop of its first call.

    Args:
        address: "host:port", "unix:/path" or "dns:///name:port".
        rpc: settings; plain text to another machine needs `rpc.insecure`.
        max_in_flight: calls kept in flight at once; further ones wait their turn.
        retry: try idempotent calls again on UNAVAILABLE; off where there are other replicas.
    """

    room: ClassVar[str]
    """The room: rollout, reward, ref or learner."""
    service: ClassVar[str]
    """Full name of the service."""
    stub_class: ClassVar[Callable[[grpc.aio.Channel], Any]]
    """The generated stub."""

    def __init__(
        self,
        address: str,
        rpc: RpcConfig | None = None,
        *,
        max_in_flight: int = policy.CLIENT_CONCURRENCY,
        retry: bool = True,
    ) -> None:
        self.address = address
        self.in_flight = 0
        """Calls sent and not yet answered."""
        self._channel = create_channel(address, rpc, retry=retry)
        self._stub = type(self).stub_class(self._channel)
        self._slots = asyncio.Semaphore(max_in_flight)

    async def __aenter__(self) -> Self:
        """Use as `async with`."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Close."""
        await self.close()

    async def close(self) -> None:
        """Close the channel; calls under way are cancelled."""
        await self._channel.close()

    async def wait_ready(self, timeout: float) -> None:
        """Wait until the server says that it serves.

        Args:
            timeout: seconds.

        Raises:
            UnavailableError: it did not within `timeout`; names address, time and last answer.
            ConfigError: a server of another kind is there.
        """
        began = time.monotonic()
        last = "no answer"
        try:
            async with asyncio.timeout(timeout):
                while True:
                    try:
                        async with aclosing(self.watch_health()) as states:
                            async for state in states:
                                if state == "SERVING":
                                    return
                                if state == "SERVICE_UNKNOWN":
                                    raise self._wrong_kind()
                                last = f"it answers {state}"
                    except InfraError as error:
                        last = error.message
                    await asyncio.sleep(_RECONNECT_SECONDS)
        except TimeoutError:
            waited = time.monotonic() - began
            raise UnavailableError(
                f"no {self.room} service at {self.address} after {waited:.1f} s: {last}",
                reason="NOT_READY",
                field=f"{self.room}.address",
                value=self.address,
                remedy="start it, or mend the address",
            ) from None

    async def watch_health(self) -> AsyncGenerator[str]:
        """The service's health now and at every change: SERVING, NOT_SERVING, SERVICE_UNKNOWN.

        Raises:
            InfraError: the connection broke, or there is none.
        """
        stub: Any = health_pb2_grpc.HealthStub(self._channel)
        call = stub.Watch(health_pb2.HealthCheckRequest(service=self.service))
        names = health_pb2.HealthCheckResponse.ServingStatus
        try:
            with self._translated():
                async for answer in call:
                    yield names.Name(answer.status)
        finally:
            call.cancel()

    async def _unary(
        self, method: str, request: Any, *, timeout: float | None, request_id: str = ""
    ) -> Any:
        """One message up, one down."""
        async with self._admitted(method):
            with self._translated():
                return await getattr(self._stub, method)(
                    request, **self._options(method, timeout, request_id)
                )

    async def _stream_up(
        self, method: str, requests: Sequence[Any], *, timeout: float | None, request_id: str
    ) -> Any:
        """Several messages up, one down."""
        async with self._admitted(method):
            with self._translated():
                return await getattr(self._stub, method)(
                    _feed(requests), **self._options(method, timeout, request_id)
                )

    async def _stream_both(
        self, method: str, requests: Sequence[Any], *, timeout: float | None
    ) -> list[Any]:
        """Several messages up, as many down, in order."""
        responses = []
        async with self._admitted(method):
            with self._translated():
                call = getattr(self._stub, method)(
                    _feed(requests), **self._options(method, timeout, "")
                )
                async for response in call:
                    responses.append(response)
        if len(responses) != len(requests):
            raise self._broken(f"{len(responses)} answers to {len(requests)} chunks of {method}")
        return responses

    async def _stream_down(
        self, method: str, request: Any, *, timeout: float | None
    ) -> AsyncIterator[Any]:
        """One message up, several down. Closing the iterator cancels the call."""
        async with self._admitted(method):
            call = getattr(self._stub, method)(request, **self._options(method, timeout, ""))
            try:
                with self._translated():
                    async for response in call:
                        yield response
            finally:
                call.cancel()

    def _read(self, decode: Callable[[Any], Value], message: Any) -> Value:
        """Decode an answer; one that the contract forbids is the fault of the server."""
        try:
            return decode(message)
        except RequestError as error:
            raise self._broken(error.message) from error

    def _options(self, method: str, timeout: float | None, request_id: str) -> dict[str, Any]:
        deadline = policy.method_policy(self.service, method).deadline
        options: dict[str, Any] = {"timeout": deadline if timeout is None else timeout}
        if request_id:
            options["metadata"] = ((policy.REQUEST_ID_KEY, request_id),)
        return options

    @asynccontextmanager
    async def _admitted(self, method: str) -> AsyncIterator[None]:
        """Wait for a slot, unless the method is a control method; count the call."""
        takes_slot = policy.takes_a_slot(self.service, method)
        if takes_slot:
            await self._slots.acquire()
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            if takes_slot:
                self._slots.release()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Raise what the server raised."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise errors.from_rpc_error(error, self.address) from error
        except grpc.aio.UsageError as error:
            raise UnavailableError(
                f"the channel is closed: {error}", reason="CLOSED", replica=self.address
            ) from error

    def _broken(self, problem: str) -> FatalError:
        return FatalError(
            f"the answer does not keep to the contract: {problem}",
            reason="CONTRACT_BROKEN",
            replica=self.address,
        )

    def _wrong_kind(self) -> ConfigError:
        return ConfigError(
            f"the server at {self.address} is no {self.room} service",
            reason="WRONG_SERVICE",
            field=f"{self.room}.address",
            value=self.address,
            remedy=f"give the address of a `quartet serve {self.room}`",
        )


async def _feed(requests: Sequence[Any]) -> AsyncIterator[Any]:
    for request in requests:
        yield request

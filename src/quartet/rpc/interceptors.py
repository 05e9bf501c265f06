"""What happens around every call a server takes, in this order: log context, metrics, errors, room.

A stage is an async context manager around the call. To add one, write it and put it in the list
that `server.py` builds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from quartet.errors import ErrorInfo, QuartetError, RequestError, UnavailableError
from quartet.obs import log, metrics
from quartet.rpc import errors, policy

_logger = logging.getLogger(__name__)

_FULL_SECONDS = 1.0
"""After how long a caller whom a full server refuses may ask again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call as the stages see it."""

    service: str
    method: str
    request_id: str
    context: grpc.aio.ServicerContext[Any, Any]


Stage = Callable[[Call], AbstractAsyncContextManager[None]]


class StagesInterceptor(grpc.aio.ServerInterceptor):
    """Puts the stages around every method of a server, outermost first."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = tuple(stages)

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap the handler of one method."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        _, service, method = handler_call_details.method.split("/")
        request_id = ""
        for key, value in handler_call_details.invocation_metadata or ():
            if key == policy.REQUEST_ID_KEY:
                request_id = str(value)

        def call_of(context: grpc.aio.ServicerContext[Any, Any]) -> Call:
            return Call(service=service, method=method, request_id=request_id, context=context)

        behaviour = (
            handler.unary_unary
            or handler.unary_stream
            or handler.stream_unary
            or handler.stream_stream
        )
        make = _HANDLERS[handler.request_streaming, handler.response_streaming]
        wrap = self._wrap_stream if handler.response_streaming else self._wrap_unary
        checked = _all_readable if handler.request_streaming else _readable
        return make(
            wrap(lambda request, context: behaviour(checked(request), context), call_of),
            request_deserializer=_lenient(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )

    def _wrap_unary(self, behaviour: Any, call_of: Callable[[Any], Call]) -> Any:
        async def handle(request: Any, context: Any) -> Any:
            async with self._around(call_of(context)):
                return await behaviour(request, context)

        return handle

    def _wrap_stream(self, behaviour: Any, call_of: Callable[[Any], Call]) -> Any:
        async def handle(request: Any, context: Any) -> AsyncIterator[Any]:
            async with self._around(call_of(context)):
                async for response in behaviour(request, context):
                    yield response

        return handle

    @asynccontextmanager
    async def _around(self, call: Call) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for stage in self._stages:
                await stack.enter_async_context(stage(call))
            yield


_HANDLERS: dict[tuple[bool, bool], Callable[..., grpc.RpcMethodHandler[Any, Any]]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """Stands for a message that is none, until the stages are there to answer for it."""

    problem: str


def _lenient(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """A deserializer that does not raise: gRPC would answer UNKNOWN, and log a traceback."""
    if deserialize is None:
        return None

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return _Unreadable(str(error))

    return read


def _readable(request: Any) -> Any:
    """The message of a call. Raises RequestError when it could not be read."""
    if isinstance(request, _Unreadable):
        raise RequestError(
            f"the request is no message of this method: {request.problem}",
            reason="UNREADABLE_MESSAGE",
            remedy="send what code made from this server's protos serializes",
        )
    return request


async def _all_readable(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The messages of a call. Raises RequestError at one that could not be read."""
    async for request in requests:
        yield _readable(request)


def log_context(room: str, replica: str) -> Stage:
    """Name room, replica and request in every line that the call logs."""

    @asynccontextmanager
    async def stage(call: Call) -> AsyncIterator[None]:
        # Every call is a task of its own, so there is nothing to take back afterwards.
        log.bind(room=room, replica=replica, request_id=call.request_id)
        yield

    return stage


@asynccontextmanager
async def count(call: Call) -> AsyncIterator[None]:
    """Count the call, its time, and the status it ended with."""
    names = (call.service, call.method)
    metrics.RPC_STARTED.labels(*names).inc()
    metrics.RPC_IN_FLIGHT.labels(*names).inc()
    began = time.perf_counter()
    code = "OK"
    try:
        yield
    except asyncio.CancelledError:
        left = call.context.time_remaining()
        code = "DEADLINE_EXCEEDED" if left is not None and left <= 0 else "CANCELLED"
        raise
    except GeneratorExit:
        code = "CANCELLED"
        raise
    except BaseException:
        code = _code_name(call.context)
        raise
    finally:
        metrics.RPC_IN_FLIGHT.labels(*names).dec()
        metrics.RPC_DURATION.labels(*names, code).observe(time.perf_counter() - began)


def map_errors(replica: str) -> Stage:
    """End a call that raised with the status of its exception; log what nobody meant to raise."""

    @asynccontextmanager
    async def stage(call: Call) -> AsyncIterator[None]:
        try:
            yield
        except grpc.aio.AbortError:
            raise  # The method ended the call itself.
        except Exception as error:
            wrapped = errors.wrap_uncaught(error)
            if not isinstance(error, QuartetError | grpc.aio.AioRpcError | NotImplementedError):
                _logger.exception("%s failed unexpectedly", call.method)
            elif wrapped.error_class == "FATAL":
                _logger.error("%s failed: %s", call.method, wrapped)
            status = errors.to_status(_signed(wrapped, replica))
            await call.context.abort(status.code, status.message, status.trailing_metadata)

    return stage


class Admission:
    """Who gets in: at most `limit` calls of work at once, and nobody while the server drains.

    Control methods always find room; health and reflection are answered to the end.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._working = 0
        self._inside = 0
        self._draining = False
        self._empty = asyncio.Event()
        self._empty.set()

    @asynccontextmanager
    async def stage(self, call: Call) -> AsyncIterator[None]:
        """Hold a place for the call, or refuse it with UnavailableError."""
        if call.service.startswith(policy.ABOUT_THE_SERVER):
            yield
            return
        if self._draining:
            raise UnavailableError("this server is shutting down", reason="DRAINING")
        takes_slot = policy.takes_a_slot(call.service, call.method)
        if takes_slot and self._working >= self._limit:
            raise UnavailableError(
                f"{self._limit} calls are being worked on already",
                info=ErrorInfo(retry_after=_FULL_SECONDS),
                reason=errors.TOO_MANY_CALLS,
                remedy="ask again later, or keep fewer calls in flight",
            )
        self._working += takes_slot
        self._inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._working -= takes_slot
            self._inside -= 1
            if self._inside == 0:
                self._empty.set()

    async def drain(self, timeout: float) -> None:
        """Refuse new calls, and wait up to `timeout` seconds for those inside."""
        self._draining = True
        if self._inside == 0:
            return
        try:
            await asyncio.wait_for(self._empty.wait(), timeout)
        except TimeoutError:
            _logger.warning("%d calls are cut off after %g s", self._inside, timeout)


def _signed(error: QuartetError, replica: str) -> QuartetError:
    """The same error with the name of this server, unless it names another."""
    if error.info.replica:
        return error
    return type(error)(error.message, info=error.info, replica=replica)


def _code_name(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    code: Any = context.code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    return errors.code_from_number(code or grpc.StatusCode.UNKNOWN.value[0])

"""Exceptions to gRPC status and back. The only place that knows both.

On the wire a failure is a google.rpc.Status with two details: quartet's ErrorDetail, from which
the caller rebuilds the exception, and google.rpc.ErrorInfo for tools that know nothing of quartet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import grpc
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from quartet import codec
from quartet.api.common.v1 import error_pb2
from quartet.errors import (
    DataError,
    DeadlineError,
    ErrorInfo,
    FatalError,
    InfraError,
    QuartetError,
    RequestError,
    StateError,
    UnavailableError,
)

DOMAIN = "quartet"
"""`domain` of every google.rpc.ErrorInfo."""

TOO_MANY_CALLS = "TOO_MANY_CALLS"
INTERNAL = "INTERNAL"

# Texts are cut to this many UTF-8 bytes: they travel in headers, percent-encoded, more than once.
_MAX_TEXT_BYTES = 1500

_CODES_BY_REASON = {
    TOO_MANY_CALLS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    "QUEUE_FULL": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "WRONG_STEP": grpc.StatusCode.ABORTED,
    "EPOCH_LOST": grpc.StatusCode.ABORTED,
    "DIGEST_MISMATCH": grpc.StatusCode.DATA_LOSS,
    "UNIMPLEMENTED": grpc.StatusCode.UNIMPLEMENTED,
}
# The first class that fits counts: subclasses come before their bases.
_CODES_BY_CLASS: tuple[tuple[type[QuartetError], grpc.StatusCode], ...] = (
    (UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (DeadlineError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (InfraError, grpc.StatusCode.ABORTED),
    (StateError, grpc.StatusCode.FAILED_PRECONDITION),
    (RequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (DataError, grpc.StatusCode.INVALID_ARGUMENT),
    (QuartetError, grpc.StatusCode.INTERNAL),
)
_NO_ROOM = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
_WRONG_STATE = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ABORTED)
# What a status without ErrorDetail means: from a proxy, from gRPC itself, from another's server.
_CLASS_BY_CODE: dict[grpc.StatusCode, type[QuartetError]] = {
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.INVALID_ARGUMENT: RequestError,
    grpc.StatusCode.OUT_OF_RANGE: RequestError,
    grpc.StatusCode.NOT_FOUND: RequestError,
    grpc.StatusCode.ALREADY_EXISTS: RequestError,
    grpc.StatusCode.PERMISSION_DENIED: RequestError,
    grpc.StatusCode.UNAUTHENTICATED: RequestError,
    grpc.StatusCode.UNIMPLEMENTED: RequestError,
    grpc.StatusCode.FAILED_PRECONDITION: StateError,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """What a server ends a failed call with."""

    code: grpc.StatusCode
    message: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...]


def code_of(error: QuartetError) -> grpc.StatusCode:
    """The gRPC code of an exception: by its reason where that has a code, else by its class."""
    by_reason = _CODES_BY_REASON.get(error.info.reason)
    if by_reason is not None:
        return by_reason
    return next(code for cls, code in _CODES_BY_CLASS if isinstance(error, cls))


def to_status(error: QuartetError) -> Status:
    """Everything about an exception, as the end of a call."""
    code = code_of(error)
    message = _cut(error.message)
    info = replace(error.info, value=_cut(error.info.value), remedy=_cut(error.info.remedy))
    status = status_pb2.Status(code=code.value[0], message=message)
    status.details.add().Pack(codec.encode_error_detail(error.error_class, message, info))
    metadata = {
        "error_class": error.error_class,
        "field": info.field,
        "sample_id": info.sample_id,
        "replica": info.replica,
    }
    status.details.add().Pack(
        error_details_pb2.ErrorInfo(
            reason=info.reason or error.error_class,
            domain=DOMAIN,
            metadata={name: value for name, value in metadata.items() if value},
        )
    )
    grpc_status = rpc_status.to_status(status)
    return Status(
        code=code, message=message, trailing_metadata=tuple(grpc_status.trailing_metadata)
    )


def wrap_uncaught(error: BaseException) -> QuartetError:
    """What the caller hears of an exception that nobody meant to raise."""
    if isinstance(error, QuartetError):
        return error
    if isinstance(error, grpc.aio.AioRpcError):
        return from_rpc_error(error)
    if isinstance(error, NotImplementedError):
        return RequestError("this server does not have the method", reason="UNIMPLEMENTED")
    return FatalError(f"{type(error).__name__}: {error}", reason=INTERNAL)


def from_rpc_error(error: grpc.aio.AioRpcError, address: str = "") -> QuartetError:
    """The exception that the server raised, or what a bare status means.

    Args:
        error: what the call raised.
        address: the server that was called, named in the exception when it does not name itself.
    """
    code = error.code()
    detail = _detail_of(error)
    if detail is None:
        return _from_bare_status(code, error.details() or "", address)
    error_class, message, info = detail
    return _class_of(error_class, code)(message, info=_with_replica(info, address))


def _class_of(error_class: str, code: grpc.StatusCode) -> type[QuartetError]:
    if error_class == "INFRA":
        if code in _NO_ROOM:
            return UnavailableError
        return DeadlineError if code is grpc.StatusCode.DEADLINE_EXCEEDED else InfraError
    if error_class == "REQUEST":
        return StateError if code in _WRONG_STATE else RequestError
    return DataError if error_class == "DATA" else FatalError


def _from_bare_status(code: grpc.StatusCode, details: str, address: str) -> QuartetError:
    text = details or "no details"
    info = ErrorInfo(reason=code.name, replica=address)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "message larger than max" in details:
        return RequestError(
            text, info=info, reason="MESSAGE_TOO_LARGE", remedy="send fewer samples a call"
        )
    # INTERNAL, UNKNOWN and CANCELLED without details come from broken connections.
    return _CLASS_BY_CODE.get(code, InfraError)(f"{code.name}: {text}", info=info)


def _detail_of(error: grpc.aio.AioRpcError) -> tuple[str, str, ErrorInfo] | None:
    """The ErrorDetail of a failed call, when there is a whole one."""
    try:
        # The sync function on purpose: the aio one takes calls, not the errors they raise.
        status = rpc_status.from_call(error)  # pyright: ignore[reportArgumentType]
    except (ValueError, DecodeError):
        return None
    for packed in status.details if status is not None else ():
        detail = error_pb2.ErrorDetail()
        if packed.Unpack(detail):
            try:
                return codec.decode_error_detail(detail)
            except RequestError:
                return None
    return None


def _with_replica(info: ErrorInfo, address: str) -> ErrorInfo:
    return info if info.replica else replace(info, replica=address)


def _cut(text: str) -> str:
    raw = text.encode()
    if len(raw) <= _MAX_TEXT_BYTES:
        return text
    return raw[:_MAX_TEXT_BYTES].decode(errors="ignore") + "..."


def code_from_number(number: int) -> str:
    """Name of a canonical code, for example "UNAVAILABLE"."""
    return code_pb2.Code.Name(number)  # pyright: ignore[reportArgumentType]

"""Exceptions to status and back."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from quartet.errors import (
    ConfigError,
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
from quartet.rpc import errors, policy

Code = grpc.StatusCode


def as_received(status: errors.Status) -> grpc.aio.AioRpcError:
    """What a client's call raises when a server ends it with `status`."""
    metadata = grpc.aio.Metadata(*status.trailing_metadata)
    return grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), metadata, status.message)


def bare(code: grpc.StatusCode, details: str = "text") -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


FULL = ErrorInfo(
    reason="SOME_REASON",
    field="groups[0].seeds",
    value="3",
    remedy="do otherwise",
    sample_id="s-1",
    replica="reward-1",
    retry_after=1.5,
)


@pytest.mark.parametrize(
    ("cls", "code"),
    [
        (UnavailableError, Code.UNAVAILABLE),
        (DeadlineError, Code.DEADLINE_EXCEEDED),
        (InfraError, Code.ABORTED),
        (StateError, Code.FAILED_PRECONDITION),
        (RequestError, Code.INVALID_ARGUMENT),
        (DataError, Code.INVALID_ARGUMENT),
        (FatalError, Code.INTERNAL),
    ],
)
def test_exception_survives_the_wire(cls: type[QuartetError], code: grpc.StatusCode) -> None:
    status = errors.to_status(cls("one sentence", info=FULL))
    assert status.code is code
    back = errors.from_rpc_error(as_received(status), "host:1")
    assert type(back) is cls
    assert (back.message, back.info) == ("one sentence", FULL)


def test_config_error_of_a_server_is_a_request_error_here() -> None:
    back = errors.from_rpc_error(as_received(errors.to_status(ConfigError("x"))))
    assert type(back) is RequestError


@pytest.mark.parametrize(
    ("error", "code", "back"),
    [
        (UnavailableError("x", reason="TOO_MANY_CALLS"), Code.RESOURCE_EXHAUSTED, UnavailableError),
        (StateError("x", reason="WRONG_STEP"), Code.ABORTED, StateError),
        (InfraError("x", reason="EPOCH_LOST"), Code.ABORTED, InfraError),
        (InfraError("x", reason="DIGEST_MISMATCH"), Code.DATA_LOSS, InfraError),
    ],
)
def test_reasons_with_a_code_of_their_own(
    error: QuartetError, code: grpc.StatusCode, back: type[QuartetError]
) -> None:
    status = errors.to_status(error)
    assert status.code is code
    assert type(errors.from_rpc_error(as_received(status))) is back


def test_error_info_for_tools_that_know_nothing_of_quartet() -> None:
    status = errors.to_status(DataError("x", reason="NOT_FINITE", sample_id="s", field="reward"))
    raw = dict(status.trailing_metadata)["grpc-status-details-bin"]
    details = status_pb2.Status.FromString(raw).details
    info = error_details_pb2.ErrorInfo()
    assert [packed.Unpack(info) for packed in details] == [False, True]
    assert (info.reason, info.domain) == ("NOT_FINITE", "quartet")
    assert info.metadata == {"error_class": "DATA", "sample_id": "s", "field": "reward"}


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        (Code.UNAVAILABLE, UnavailableError),
        (Code.RESOURCE_EXHAUSTED, UnavailableError),
        (Code.DEADLINE_EXCEEDED, DeadlineError),
        (Code.INVALID_ARGUMENT, RequestError),
        (Code.UNIMPLEMENTED, RequestError),
        (Code.PERMISSION_DENIED, RequestError),
        (Code.FAILED_PRECONDITION, StateError),
        (Code.INTERNAL, InfraError),
        (Code.UNKNOWN, InfraError),
        (Code.CANCELLED, InfraError),
        (Code.DATA_LOSS, InfraError),
    ],
)
def test_bare_status(code: grpc.StatusCode, cls: type[QuartetError]) -> None:
    error = errors.from_rpc_error(bare(code), "host:1")
    assert type(error) is cls
    assert error.info.replica == "host:1"
    assert error.info.reason == code.name


def test_message_that_is_too_large_is_the_callers_fault() -> None:
    text = "Received message larger than max (5 vs. 4)"
    error = errors.from_rpc_error(bare(Code.RESOURCE_EXHAUSTED, text))
    assert isinstance(error, RequestError)
    assert error.info.reason == "MESSAGE_TOO_LARGE"
    assert error.info.remedy


def test_details_that_are_no_details_are_ignored() -> None:
    metadata = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff"))
    error = grpc.aio.AioRpcError(Code.UNAVAILABLE, grpc.aio.Metadata(), metadata, "x")
    assert type(errors.from_rpc_error(error)) is UnavailableError


def test_long_texts_fit_into_metadata() -> None:
    long = "字" * 20000
    status = errors.to_status(RequestError(long, value=long, remedy=long))
    raw = dict(status.trailing_metadata)["grpc-status-details-bin"]
    percent_encoded = 3 * len(status.message.encode())
    assert len(raw) * 4 / 3 + percent_encoded < policy.MAX_METADATA_BYTES
    assert errors.from_rpc_error(as_received(status)).message.startswith("字")


def test_uncaught_exceptions() -> None:
    wrapped = errors.wrap_uncaught(KeyError("k"))
    assert type(wrapped) is FatalError
    assert wrapped.message == "KeyError: 'k'"
    assert wrapped.info.reason == "INTERNAL"
    assert errors.wrap_uncaught(error := DataError("x")) is error
    assert type(errors.wrap_uncaught(bare(Code.UNAVAILABLE))) is UnavailableError

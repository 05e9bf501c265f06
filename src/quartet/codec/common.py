"""Messages of quartet.api.common.v1: sequences, log-probability specs, failures, info, time."""

from __future__ import annotations

import numpy as np
from google.protobuf.duration_pb2 import Duration

from quartet.api.common.v1 import error_pb2, info_pb2, sequence_pb2
from quartet.codec.check import at_least, distinct, finite, invalid, one_each, present
from quartet.codec.enums import FINISH_REASON, LOGPROB_KIND
from quartet.codec.tensor import decode_vector, encode_vector
from quartet.errors import ErrorInfo
from quartet.types import Failure, LogprobSpec, SequenceBatch, ServerInfo

encode_logprob_kind = LOGPROB_KIND.encode
decode_logprob_kind = LOGPROB_KIND.decode
encode_finish_reason = FINISH_REASON.encode
decode_finish_reason = FINISH_REASON.decode

_NANOS = 1_000_000_000
_LONGEST_SECONDS = 365 * 24 * 3600
_CLASSES = {
    "INFRA": error_pb2.ERROR_CLASS_INFRA,
    "DATA": error_pb2.ERROR_CLASS_DATA,
    "REQUEST": error_pb2.ERROR_CLASS_REQUEST,
    "FATAL": error_pb2.ERROR_CLASS_FATAL,
}
_CLASS_NAMES = {number: name for name, number in _CLASSES.items()}


def encode_duration(seconds: float) -> Duration:
    """Seconds as a Duration, to the nanosecond."""
    duration = Duration()
    duration.FromNanoseconds(round(finite(seconds, "duration") * _NANOS))
    return duration


def decode_duration(message: Duration, field: str = "duration") -> float:
    """A Duration as seconds, from 0 to a year: clocks count longer waits wrong, or not at all."""
    seconds = message.ToNanoseconds() / _NANOS
    at_least(0, seconds, field)
    if seconds > _LONGEST_SECONDS:
        raise invalid(field, seconds, f"is {seconds:g} s, above a year")
    return seconds


def encode_sequence_batch(batch: SequenceBatch) -> sequence_pb2.SequenceBatch:
    """Encode B ragged sequences."""
    return sequence_pb2.SequenceBatch(
        token_ids=encode_vector(batch.token_ids, np.int32),
        lengths=encode_vector(batch.lengths, np.int32),
        sample_ids=batch.sample_ids,
    )


def decode_sequence_batch(
    message: sequence_pb2.SequenceBatch, field: str = "sequences"
) -> SequenceBatch:
    """Decode B ragged sequences; lengths, tokens and names fit one another."""
    token_ids = decode_vector(message.token_ids, np.int32, None, f"{field}.token_ids")
    lengths = decode_vector(message.lengths, np.int32, None, f"{field}.lengths")
    if np.any(lengths < 1):
        shortest = int(lengths.min())
        raise invalid(f"{field}.lengths", shortest, f"has a sequence of {shortest} tokens")
    total = int(lengths.sum(dtype=np.int64))
    if total != len(token_ids):
        raise invalid(
            f"{field}.lengths", total, f"add up to {total}, but there are {len(token_ids)} tokens"
        )
    if np.any(token_ids < 0):
        raise invalid(f"{field}.token_ids", int(token_ids.min()), "has a negative token id")
    sample_ids = tuple(message.sample_ids)
    one_each(sample_ids, len(lengths), f"{field}.sample_ids", "sequences")
    distinct(sample_ids, f"{field}.sample_ids")
    return SequenceBatch(token_ids=token_ids, lengths=lengths, sample_ids=sample_ids)


def encode_logprob_spec(spec: LogprobSpec) -> sequence_pb2.LogprobSpec:
    """Encode a behaviour distribution."""
    return sequence_pb2.LogprobSpec(
        kind=encode_logprob_kind(spec.kind),
        temperature=spec.temperature,
        top_p=spec.top_p,
        top_k=spec.top_k,
    )


def decode_logprob_spec(
    message: sequence_pb2.LogprobSpec, field: str = "logprob_spec"
) -> LogprobSpec:
    """Decode a behaviour distribution."""
    check_sampling(message.temperature, message.top_p, message.top_k, field)
    return LogprobSpec(
        kind=decode_logprob_kind(message.kind, f"{field}.kind"),
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
    )


def check_sampling(temperature: float, top_p: float, top_k: int, field: str) -> None:
    """Refuse what is no distribution over tokens."""
    at_least(0, finite(temperature, f"{field}.temperature"), f"{field}.temperature")
    if not 0 < top_p <= 1:
        raise invalid(f"{field}.top_p", top_p, f"is {top_p}, outside (0, 1]")
    if top_k != -1 and top_k < 1:
        raise invalid(f"{field}.top_k", top_k, f"is {top_k}", "-1 for all tokens, or 1 and more")


def decode_temperature(message: object, field: str = "temperature") -> float:
    """The optional `temperature` of a chunk: a divisor of logits, by default 1."""
    if not message.HasField("temperature"):  # pyright: ignore[reportAttributeAccessIssue]
        return 1.0
    value: float = message.temperature  # pyright: ignore[reportAttributeAccessIssue]
    if not finite(value, field) > 0:
        raise invalid(field, value, f"is {value}: logits cannot be divided by it")
    return value


def encode_failure(failure: Failure) -> error_pb2.ErrorDetail:
    """Encode why there is no result for one sample."""
    return encode_error_detail(
        failure.error_class,
        failure.message,
        ErrorInfo(reason=failure.reason, replica=failure.replica),
    )


def decode_failure(message: error_pb2.ErrorDetail, field: str = "failure") -> Failure:
    """Decode why there is no result for one sample."""
    error_class, text, info = decode_error_detail(message, field)
    return Failure(error_class=error_class, reason=info.reason, message=text, replica=info.replica)


def encode_error_detail(error_class: str, message: str, info: ErrorInfo) -> error_pb2.ErrorDetail:
    """Encode a failure: its class (INFRA, DATA, REQUEST or FATAL), its sentence, its details."""
    if error_class not in _CLASSES:
        raise invalid("error_class", error_class, f"is {error_class!r}", ", ".join(_CLASSES))
    return error_pb2.ErrorDetail(
        error_class=_CLASSES[error_class],
        reason=info.reason,
        message=message,
        field=info.field,
        value=info.value,
        remedy=info.remedy,
        sample_id=info.sample_id,
        replica=info.replica,
        retry_after=None if info.retry_after is None else encode_duration(info.retry_after),
    )


def decode_error_detail(
    message: error_pb2.ErrorDetail, field: str = "error"
) -> tuple[str, str, ErrorInfo]:
    """Decode a failure into its class, its sentence and its details."""
    error_class = _CLASS_NAMES.get(message.error_class)
    if error_class is None:
        raise invalid(f"{field}.error_class", message.error_class, "is not set or not known")
    wait = message.retry_after if message.HasField("retry_after") else None
    return (
        error_class,
        message.message,
        ErrorInfo(
            reason=message.reason,
            field=message.field,
            value=message.value,
            remedy=message.remedy,
            sample_id=message.sample_id,
            replica=message.replica,
            retry_after=None if wait is None else decode_duration(wait, f"{field}.retry_after"),
        ),
    )


def encode_server_info(info: ServerInfo) -> info_pb2.ServerInfo:
    """Encode what a service says of itself."""
    return info_pb2.ServerInfo(
        service=info.service,
        api_version=info.api_version,
        server_version=info.server_version,
        replica=info.replica,
        digest=info.digest,
        tokenizer_fingerprint=info.tokenizer_fingerprint,
        capabilities=info.capabilities,
        max_sequence_length=info.max_sequence_length,
        max_concurrent_calls=info.max_concurrent_calls,
        model_name_or_path=info.model_name_or_path,
    )


def decode_server_info(message: info_pb2.ServerInfo, field: str = "info") -> ServerInfo:
    """Decode what a service says of itself."""
    at_least(0, message.max_sequence_length, f"{field}.max_sequence_length")
    at_least(0, message.max_concurrent_calls, f"{field}.max_concurrent_calls")
    return ServerInfo(
        service=present(message.service, f"{field}.service"),
        api_version=present(message.api_version, f"{field}.api_version"),
        server_version=message.server_version,
        replica=message.replica,
        digest=message.digest,
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        capabilities=tuple(message.capabilities),
        max_sequence_length=message.max_sequence_length,
        max_concurrent_calls=message.max_concurrent_calls,
        model_name_or_path=message.model_name_or_path,
    )

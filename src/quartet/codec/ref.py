"""Messages of quartet.api.ref.v1."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quartet.api.ref.v1 import ref_service_pb2 as pb
from quartet.codec.check import at_least
from quartet.codec.common import (
    decode_sequence_batch,
    decode_server_info,
    decode_temperature,
    encode_sequence_batch,
    encode_server_info,
)
from quartet.codec.tensor import decode_vector, encode_vector
from quartet.types import ComputeLogprobsRequest, RefInfo


def encode_ref_info(info: RefInfo) -> pb.GetInfoResponse:
    """Encode the answer of GetInfo."""
    return pb.GetInfoResponse(info=encode_server_info(info.info))


def decode_ref_info(message: pb.GetInfoResponse) -> RefInfo:
    """Decode the answer of GetInfo."""
    return RefInfo(info=decode_server_info(message.info))


def encode_compute_logprobs_request(request: ComputeLogprobsRequest) -> pb.ComputeLogprobsRequest:
    """Encode one chunk."""
    return pb.ComputeLogprobsRequest(
        chunk_id=request.chunk_id,
        sequences=encode_sequence_batch(request.sequences),
        temperature=request.temperature,
        max_tokens_per_micro_batch=request.max_tokens_per_micro_batch,
    )


def decode_compute_logprobs_request(message: pb.ComputeLogprobsRequest) -> ComputeLogprobsRequest:
    """Decode one chunk."""
    budget = None
    if message.HasField("max_tokens_per_micro_batch"):
        budget = message.max_tokens_per_micro_batch
        at_least(1, budget, "max_tokens_per_micro_batch")
    return ComputeLogprobsRequest(
        chunk_id=message.chunk_id,
        sequences=decode_sequence_batch(message.sequences),
        temperature=decode_temperature(message),
        max_tokens_per_micro_batch=budget,
    )


def encode_compute_logprobs_response(
    chunk_id: str, logprobs: NDArray[np.float32]
) -> pb.ComputeLogprobsResponse:
    """Encode the [N] log-probabilities of one chunk."""
    return pb.ComputeLogprobsResponse(
        chunk_id=chunk_id, logprobs=encode_vector(logprobs, np.float32)
    )


def decode_compute_logprobs_response(
    message: pb.ComputeLogprobsResponse, num_tokens: int | None = None
) -> tuple[str, NDArray[np.float32]]:
    """Decode one chunk's name and its [N] log-probabilities; N is `num_tokens` where given."""
    return message.chunk_id, decode_vector(message.logprobs, np.float32, num_tokens, "logprobs")


def encode_ref_sleep_request(request_id: str) -> pb.SleepRequest:
    """Encode a call of Sleep; `decode_request_id` reads it."""
    return pb.SleepRequest(request_id=request_id)


def encode_ref_wake_request(request_id: str) -> pb.WakeRequest:
    """Encode a call of Wake; `decode_request_id` reads it."""
    return pb.WakeRequest(request_id=request_id)

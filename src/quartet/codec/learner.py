"""Messages of quartet.api.learner.v1, without its losses (see codec.loss)."""

from __future__ import annotations

from typing import Any

import numpy as np

from quartet.api.learner.v1 import learner_service_pb2 as pb
from quartet.codec.check import at_least, decode_request_id, finite, invalid, present
from quartet.codec.common import (
    decode_duration,
    decode_logprob_spec,
    decode_sequence_batch,
    decode_server_info,
    decode_temperature,
    encode_duration,
    encode_logprob_spec,
    encode_sequence_batch,
    encode_server_info,
)
from quartet.codec.enums import FORWARD_OUTPUT, HEAD
from quartet.codec.loss import decode_loss, encode_loss
from quartet.codec.tensor import decode_vector, encode_vector
from quartet.codec.weights import decode_weight_manifest, encode_weight_manifest
from quartet.types import (
    ForwardRequest,
    ForwardResult,
    LearnerInfo,
    TrainResult,
    TrainSamples,
    TrainStep,
)

encode_head = HEAD.encode
decode_head = HEAD.decode
encode_forward_output = FORWARD_OUTPUT.encode
decode_forward_output = FORWARD_OUTPUT.decode

_PER_TOKEN = (
    "advantages",
    "old_logprobs",
    "ref_logprobs",
    "rollout_logprobs",
    "returns",
    "old_values",
)


def encode_learner_info(info: LearnerInfo) -> pb.GetInfoResponse:
    """Encode the answer of GetInfo."""
    return pb.GetInfoResponse(
        info=encode_server_info(info.info),
        head=encode_head(info.head),
        world_size=info.world_size,
        num_parameters=info.num_parameters,
        run_id=info.run_id,
        optimizer_steps=info.optimizer_steps,
        policy_version=info.policy_version,
        manifest=None if info.manifest is None else encode_weight_manifest(info.manifest),
    )


def decode_learner_info(message: pb.GetInfoResponse) -> LearnerInfo:
    """Decode the answer of GetInfo."""
    at_least(1, message.world_size, "world_size")
    at_least(0, message.optimizer_steps, "optimizer_steps")
    at_least(0, message.policy_version, "policy_version")
    manifest = decode_weight_manifest(message.manifest) if message.HasField("manifest") else None
    return LearnerInfo(
        info=decode_server_info(message.info),
        head=decode_head(message.head, "head"),
        world_size=message.world_size,
        num_parameters=message.num_parameters,
        run_id=message.run_id,
        optimizer_steps=message.optimizer_steps,
        policy_version=message.policy_version,
        manifest=manifest,
    )


def encode_forward_request(request: ForwardRequest) -> pb.ForwardRequest:
    """Encode one chunk to evaluate."""
    return pb.ForwardRequest(
        chunk_id=request.chunk_id,
        sequences=encode_sequence_batch(request.sequences),
        temperature=request.temperature,
        output=FORWARD_OUTPUT.encode_or_unset(request.output, "output"),
        max_tokens_per_micro_batch=request.max_tokens_per_micro_batch,
        with_entropy=request.with_entropy,
    )


def decode_forward_request(message: pb.ForwardRequest) -> ForwardRequest:
    """Decode one chunk to evaluate."""
    # UNSPECIFIED is documented as "the head's own".
    output = decode_forward_output(message.output, "output") if message.output else None
    return ForwardRequest(
        chunk_id=message.chunk_id,
        sequences=decode_sequence_batch(message.sequences),
        temperature=decode_temperature(message),
        output=output,
        max_tokens_per_micro_batch=_budget(message, "max_tokens_per_micro_batch"),
        with_entropy=message.with_entropy,
    )


def encode_forward_result(result: ForwardResult) -> pb.ForwardResponse:
    """Encode the result of one chunk."""
    entropy = result.entropy
    return pb.ForwardResponse(
        chunk_id=result.chunk_id,
        output=encode_vector(result.output, np.float32),
        entropy=None if entropy is None else encode_vector(entropy, np.float32),
    )


def decode_forward_result(message: pb.ForwardResponse) -> ForwardResult:
    """Decode the result of one chunk."""
    entropy = None
    if message.HasField("entropy"):
        entropy = decode_vector(message.entropy, np.float32, None, "entropy")
    return ForwardResult(
        chunk_id=message.chunk_id,
        output=decode_vector(message.output, np.float32, None, "output"),
        entropy=entropy,
    )


def encode_train_step(step: TrainStep) -> pb.TrainHeader:
    """Encode the header of an optimizer step."""
    header = encode_loss(step.loss)
    header.MergeFrom(
        pb.TrainHeader(
            request_id=step.request_id,
            run_id=step.run_id,
            expected_optimizer_steps=step.expected_optimizer_steps,
            max_tokens_per_micro_batch=step.max_tokens_per_micro_batch,
            micro_batch_size=step.micro_batch_size,
        )
    )
    return header


def decode_train_step(message: pb.TrainHeader) -> TrainStep:
    """Decode the header of an optimizer step."""
    at_least(0, message.expected_optimizer_steps, "expected_optimizer_steps")
    return TrainStep(
        request_id=decode_request_id(message),
        run_id=present(message.run_id, "run_id"),
        loss=decode_loss(message),
        expected_optimizer_steps=message.expected_optimizer_steps,
        max_tokens_per_micro_batch=_budget(message, "max_tokens_per_micro_batch"),
        micro_batch_size=_budget(message, "micro_batch_size"),
    )


def encode_train_samples(samples: TrainSamples) -> pb.TrainSamples:
    """Encode a chunk of samples."""
    tensors = {
        name: encode_vector(array, np.float32)
        for name in (*_PER_TOKEN, "margins")
        if (array := getattr(samples, name)) is not None
    }
    if samples.action_mask is not None:
        tensors["action_mask"] = encode_vector(samples.action_mask, np.bool_)
    spec = samples.rollout_logprob_spec
    return pb.TrainSamples(
        sequences=encode_sequence_batch(samples.sequences),
        rollout_logprob_spec=None if spec is None else encode_logprob_spec(spec),
        **tensors,
    )


def decode_train_samples(message: pb.TrainSamples, field: str = "samples") -> TrainSamples:
    """Decode a chunk of samples; every per-token array has one element a token."""
    sequences = decode_sequence_batch(message.sequences, f"{field}.sequences")
    total = sequences.num_tokens
    arrays: dict[str, Any] = {
        name: decode_vector(getattr(message, name), np.float32, total, f"{field}.{name}")
        for name in _PER_TOKEN
        if message.HasField(name)
    }
    if message.HasField("action_mask"):
        arrays["action_mask"] = decode_vector(
            message.action_mask, np.bool_, total, f"{field}.action_mask"
        )
    if message.HasField("margins"):
        pairs = len(sequences) // 2
        arrays["margins"] = decode_vector(message.margins, np.float32, pairs, f"{field}.margins")
    if message.HasField("rollout_logprob_spec"):
        arrays["rollout_logprob_spec"] = decode_logprob_spec(
            message.rollout_logprob_spec, f"{field}.rollout_logprob_spec"
        )
    return TrainSamples(sequences=sequences, **arrays)


def encode_train_request(part: TrainStep | TrainSamples) -> pb.TrainRequest:
    """Encode one message of a Train stream."""
    if isinstance(part, TrainStep):
        return pb.TrainRequest(header=encode_train_step(part))
    return pb.TrainRequest(samples=encode_train_samples(part))


def decode_train_request(message: pb.TrainRequest) -> TrainStep | TrainSamples:
    """Decode one message of a Train stream."""
    match message.WhichOneof("part"):
        case "header":
            return decode_train_step(message.header)
        case "samples":
            return decode_train_samples(message.samples)
        case None:
            raise invalid("part", "", "is neither a header nor samples")


def encode_train_result(result: TrainResult) -> pb.TrainResponse:
    """Encode the answer of an optimizer step."""
    return pb.TrainResponse(
        optimizer_steps=result.optimizer_steps,
        applied=result.applied,
        metrics=dict(result.metrics),
        grad_norm=result.grad_norm,
        lr=result.lr,
        num_samples=result.num_samples,
        num_action_tokens=result.num_action_tokens,
        num_tokens=result.num_tokens,
        num_micro_batches=result.num_micro_batches,
        duration=encode_duration(result.seconds),
    )


def decode_train_result(message: pb.TrainResponse) -> TrainResult:
    """Decode the answer of an optimizer step.

    The gradient norm is finite unless the step was refused for it; metrics may then be anything.
    """
    if message.applied:
        finite(message.grad_norm, "grad_norm")
    return TrainResult(
        optimizer_steps=message.optimizer_steps,
        applied=message.applied,
        metrics=dict(sorted(message.metrics.items())),
        grad_norm=message.grad_norm,
        lr=message.lr,
        num_samples=message.num_samples,
        num_action_tokens=message.num_action_tokens,
        num_tokens=message.num_tokens,
        num_micro_batches=message.num_micro_batches,
        seconds=decode_duration(message.duration),
    )


def encode_learner_sleep_request(request_id: str) -> pb.SleepRequest:
    """Encode a call of Sleep; `decode_request_id` reads it."""
    return pb.SleepRequest(request_id=request_id)


def encode_learner_wake_request(request_id: str) -> pb.WakeRequest:
    """Encode a call of Wake; `decode_request_id` reads it."""
    return pb.WakeRequest(request_id=request_id)


def _budget(message: Any, field: str) -> int | None:
    """An optional number of tokens or sequences, at least 1."""
    if not message.HasField(field):
        return None
    at_least(1, getattr(message, field), field)
    return int(getattr(message, field))

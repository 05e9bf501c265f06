"""Messages of a weight push: common weights, and the rollout service's push methods."""

from __future__ import annotations

from quartet.api.common.v1 import weights_pb2
from quartet.api.rollout.v1 import rollout_service_pb2 as pb
from quartet.codec.check import at_least, decode_request_id, distinct, invalid, present
from quartet.codec.common import (
    decode_duration,
    decode_error_detail,
    encode_duration,
    encode_error_detail,
)
from quartet.codec.enums import PUSH_BACKEND, REPLICA_STATE, EnumCodec
from quartet.codec.tensor import decode_dtype, encode_dtype
from quartet.errors import ErrorInfo
from quartet.types import (
    AbortWeightsRequest,
    AbortWeightsResult,
    CommitWeightsRequest,
    CommitWeightsResult,
    IpcSegment,
    PrepareWeightsRequest,
    PrepareWeightsResult,
    ReceiveEvent,
    ReceiveWeightsRequest,
    Rendezvous,
    ReplicaPushResult,
    TensorSpec,
    WeightManifest,
)

CUDA_HANDLE_BYTES = 64
"""Size of a cudaIpcMemHandle_t."""

encode_push_backend = PUSH_BACKEND.encode
decode_push_backend = PUSH_BACKEND.decode
_EVENT: EnumCodec[str] = EnumCodec(
    pb.ReceiveEvent,
    {name: f"RECEIVE_EVENT_{name.upper()}" for name in ("ready", "bucket", "done", "failed")},
)


def encode_tensor_spec(spec: TensorSpec) -> weights_pb2.TensorSpec:
    """Encode name, type and shape of one tensor."""
    return weights_pb2.TensorSpec(
        name=spec.name, data_type=encode_dtype(spec.dtype, f"{spec.name}.dtype"), shape=spec.shape
    )


def decode_tensor_spec(message: weights_pb2.TensorSpec, field: str = "tensor") -> TensorSpec:
    """Decode name, type and shape of one tensor."""
    shape = tuple(message.shape)
    if any(size < 0 for size in shape):
        raise invalid(f"{field}.shape", shape, f"has a negative size: {shape}")
    return TensorSpec(
        name=present(message.name, f"{field}.name"),
        dtype=decode_dtype(message.data_type, f"{field}.data_type"),
        shape=shape,
    )


def encode_weight_manifest(manifest: WeightManifest) -> weights_pb2.WeightManifest:
    """Encode the tensors of a push, in order."""
    return weights_pb2.WeightManifest(
        tensors=[encode_tensor_spec(spec) for spec in manifest.tensors],
        bucket_bytes=manifest.bucket_bytes,
        aliases=[f"{alias}={name}" for alias, name in manifest.aliases.items()],
    )


def decode_weight_manifest(
    message: weights_pb2.WeightManifest, field: str = "manifest"
) -> WeightManifest:
    """Decode the tensors of a push; no name twice, every alias of a tensor that is there."""
    at_least(1, message.bucket_bytes, f"{field}.bucket_bytes")
    tensors = tuple(
        decode_tensor_spec(m, f"{field}.tensors[{i}]") for i, m in enumerate(message.tensors)
    )
    names = [spec.name for spec in tensors]
    distinct(names, f"{field}.tensors.name")
    aliases: dict[str, str] = {}
    for text in message.aliases:
        alias, equals, name = text.partition("=")
        if not alias or not equals or not name:
            raise invalid(f"{field}.aliases", text, f"has {text!r}, which is not alias=name")
        aliases[alias] = name
    unknown = sorted(set(aliases.values()) - set(names))
    if unknown:
        raise invalid(f"{field}.aliases", unknown[0], f"names {unknown[0]}, which is not sent")
    return WeightManifest(tensors=tensors, bucket_bytes=message.bucket_bytes, aliases=aliases)


def encode_rendezvous(rendezvous: Rendezvous) -> weights_pb2.Rendezvous:
    """Encode where a group meets."""
    return weights_pb2.Rendezvous(
        store_address=rendezvous.store_address,
        group_name=rendezvous.group_name,
        folder=rendezvous.folder,
        ipc_handles=dict(rendezvous.ipc_handles),
        ipc=None if rendezvous.ipc is None else encode_ipc_segment(rendezvous.ipc),
    )


def decode_rendezvous(message: weights_pb2.Rendezvous) -> Rendezvous:
    """Decode where a group meets."""
    return Rendezvous(
        store_address=message.store_address,
        group_name=message.group_name,
        folder=message.folder,
        ipc_handles=dict(sorted(message.ipc_handles.items())),
        ipc=decode_ipc_segment(message.ipc) if message.HasField("ipc") else None,
    )


def encode_ipc_segment(segment: IpcSegment) -> weights_pb2.IpcSegment:
    """Encode where the memory of a push is."""
    return weights_pb2.IpcSegment(
        machine=segment.machine,
        size_bytes=segment.size_bytes,
        process_id=segment.process_id,
        descriptor=segment.descriptor,
        inode=segment.inode,
        gpu_uuid=segment.gpu_uuid,
        cuda_handle=segment.cuda_handle,
    )


def decode_ipc_segment(message: weights_pb2.IpcSegment) -> IpcSegment:
    """Decode where the memory of a push is."""
    field = "rendezvous.ipc"
    at_least(1, message.size_bytes, f"{field}.size_bytes")
    at_least(0, message.process_id, f"{field}.process_id")
    at_least(0, message.descriptor, f"{field}.descriptor")
    if message.gpu_uuid and len(message.cuda_handle) != CUDA_HANDLE_BYTES:
        size = len(message.cuda_handle)
        raise invalid(f"{field}.cuda_handle", size, f"has {size} bytes, not {CUDA_HANDLE_BYTES}")
    return IpcSegment(
        machine=present(message.machine, f"{field}.machine"),
        size_bytes=message.size_bytes,
        process_id=message.process_id,
        descriptor=message.descriptor,
        inode=message.inode,
        gpu_uuid=message.gpu_uuid,
        cuda_handle=message.cuda_handle,
    )


def encode_replica_push_result(result: ReplicaPushResult) -> weights_pb2.ReplicaPushResult:
    """Encode what became of one replica."""
    return weights_pb2.ReplicaPushResult(
        address=result.address,
        replica=result.replica,
        committed=result.committed,
        failed_phase=result.failed_phase,
        error=result.error,
    )


def decode_replica_push_result(
    message: weights_pb2.ReplicaPushResult, field: str = "replica"
) -> ReplicaPushResult:
    """Decode what became of one replica."""
    return ReplicaPushResult(
        address=present(message.address, f"{field}.address"),
        replica=message.replica,
        committed=message.committed,
        failed_phase=message.failed_phase,
        error=message.error,
    )


def encode_prepare_weights_request(request: PrepareWeightsRequest) -> pb.PrepareWeightsRequest:
    """Encode the first phase of a push."""
    return pb.PrepareWeightsRequest(
        request_id=request.request_id,
        epoch=request.epoch,
        policy_version=request.policy_version,
        manifest=encode_weight_manifest(request.manifest),
        backend=encode_push_backend(request.backend),
        rendezvous=encode_rendezvous(request.rendezvous),
        rank=request.rank,
        world_size=request.world_size,
        group_timeout=encode_duration(request.group_timeout),
    )


def decode_prepare_weights_request(message: pb.PrepareWeightsRequest) -> PrepareWeightsRequest:
    """Decode the first phase of a push."""
    at_least(1, message.epoch, "epoch")
    at_least(0, message.policy_version, "policy_version")
    at_least(0, message.rank, "rank")
    at_least(message.rank + 1, message.world_size, "world_size")
    seconds = decode_duration(message.group_timeout, "group_timeout")
    if seconds == 0:
        raise invalid("group_timeout", 0, "is not set: a member could wait forever")
    return PrepareWeightsRequest(
        request_id=decode_request_id(message),
        epoch=message.epoch,
        policy_version=message.policy_version,
        manifest=decode_weight_manifest(message.manifest),
        backend=decode_push_backend(message.backend, "backend"),
        rendezvous=decode_rendezvous(message.rendezvous),
        rank=message.rank,
        world_size=message.world_size,
        group_timeout=seconds,
    )


def encode_prepare_weights_result(result: PrepareWeightsResult) -> pb.PrepareWeightsResponse:
    """Encode that the replica has joined."""
    return pb.PrepareWeightsResponse(replica=result.replica, num_ranks=result.num_ranks)


def decode_prepare_weights_result(message: pb.PrepareWeightsResponse) -> PrepareWeightsResult:
    """Decode that the replica has joined."""
    at_least(1, message.num_ranks, "num_ranks")
    return PrepareWeightsResult(replica=message.replica, num_ranks=message.num_ranks)


def encode_receive_weights_request(request: ReceiveWeightsRequest) -> pb.ReceiveWeightsRequest:
    """Encode the second phase of a push."""
    return pb.ReceiveWeightsRequest(epoch=request.epoch, policy_version=request.policy_version)


def decode_receive_weights_request(message: pb.ReceiveWeightsRequest) -> ReceiveWeightsRequest:
    """Decode the second phase of a push."""
    at_least(1, message.epoch, "epoch")
    return ReceiveWeightsRequest(epoch=message.epoch, policy_version=message.policy_version)


def encode_receive_event(event: ReceiveEvent) -> pb.ReceiveWeightsResponse:
    """Encode one event of a receive."""
    detail = None
    if event.error:
        detail = encode_error_detail("INFRA", event.error, ErrorInfo(reason="RECEIVE_FAILED"))
    return pb.ReceiveWeightsResponse(
        event=_EVENT.encode(event.event, "event"),
        bucket_index=event.bucket_index,
        digest=event.digest,
        error=detail,
    )


def decode_receive_event(message: pb.ReceiveWeightsResponse) -> ReceiveEvent:
    """Decode one event of a receive."""
    at_least(0, message.bucket_index, "bucket_index")
    error = decode_error_detail(message.error)[1] if message.HasField("error") else ""
    return ReceiveEvent(
        event=_EVENT.decode(message.event, "event"),
        bucket_index=message.bucket_index,
        digest=message.digest,
        error=error,
    )


def encode_commit_weights_request(request: CommitWeightsRequest) -> pb.CommitWeightsRequest:
    """Encode the third phase of a push."""
    return pb.CommitWeightsRequest(
        epoch=request.epoch, policy_version=request.policy_version, digest=request.digest
    )


def decode_commit_weights_request(message: pb.CommitWeightsRequest) -> CommitWeightsRequest:
    """Decode the third phase of a push."""
    at_least(1, message.epoch, "epoch")
    return CommitWeightsRequest(
        epoch=message.epoch,
        policy_version=message.policy_version,
        digest=present(message.digest, "digest"),
    )


def encode_commit_weights_result(result: CommitWeightsResult) -> pb.CommitWeightsResponse:
    """Encode the version that serves now."""
    return pb.CommitWeightsResponse(
        policy_version=result.policy_version, completions_continued=result.completions_continued
    )


def decode_commit_weights_result(message: pb.CommitWeightsResponse) -> CommitWeightsResult:
    """Decode the version that serves now."""
    return CommitWeightsResult(
        policy_version=message.policy_version, completions_continued=message.completions_continued
    )


def encode_abort_weights_request(request: AbortWeightsRequest) -> pb.AbortWeightsRequest:
    """Encode the end of a push that failed."""
    return pb.AbortWeightsRequest(epoch=request.epoch, cause=request.cause)


def decode_abort_weights_request(message: pb.AbortWeightsRequest) -> AbortWeightsRequest:
    """Decode the end of a push that failed."""
    return AbortWeightsRequest(epoch=message.epoch, cause=message.cause)


def encode_abort_weights_result(result: AbortWeightsResult) -> pb.AbortWeightsResponse:
    """Encode what serves after a push that failed."""
    return pb.AbortWeightsResponse(
        policy_version=result.policy_version, state=REPLICA_STATE.encode(result.state)
    )


def decode_abort_weights_result(message: pb.AbortWeightsResponse) -> AbortWeightsResult:
    """Decode what serves after a push that failed."""
    return AbortWeightsResult(
        policy_version=message.policy_version, state=REPLICA_STATE.decode(message.state, "state")
    )

"""Messages of quartet.api.learner.v1 that begin, keep and hand on a run."""

from __future__ import annotations

from dataclasses import replace

from quartet.api.learner.v1 import learner_service_pb2 as pb
from quartet.codec.check import at_least, decode_request_id, finite, invalid, present
from quartet.codec.common import decode_duration, encode_duration
from quartet.codec.enums import OPTIMIZER_TYPE, PUSH_BACKEND
from quartet.codec.weights import (
    decode_push_backend,
    decode_replica_push_result,
    encode_replica_push_result,
)
from quartet.types import (
    ExportModelRequest,
    LoadCheckpointRequest,
    LoadCheckpointResult,
    MuonConfig,
    OptimizerConfig,
    PushResult,
    PushWeightsRequest,
    RunSpec,
    SaveCheckpointRequest,
    SavedFolder,
    ScheduleConfig,
    StartRunRequest,
    StartRunResult,
)


def encode_muon_config(config: MuonConfig) -> pb.MuonConfig:
    """Encode Muon's settings."""
    return pb.MuonConfig(
        lr=config.lr,
        momentum=config.momentum,
        ns_steps=config.ns_steps,
        nesterov=config.nesterov,
    )


def decode_muon_config(message: pb.MuonConfig, field: str = "muon") -> MuonConfig:
    """Decode Muon's settings."""
    at_least(1, message.ns_steps, f"{field}.ns_steps")
    return MuonConfig(
        lr=finite(message.lr, f"{field}.lr"),
        momentum=finite(message.momentum, f"{field}.momentum"),
        ns_steps=message.ns_steps,
        nesterov=message.nesterov,
    )


def encode_optimizer_config(config: OptimizerConfig) -> pb.OptimizerConfig:
    """Encode the optimizer's settings."""
    return pb.OptimizerConfig(
        type=OPTIMIZER_TYPE.encode(config.type, "type"),
        lr=config.lr,
        beta1=config.betas[0],
        beta2=config.betas[1],
        eps=config.eps,
        weight_decay=config.weight_decay,
        muon=None if config.muon is None else encode_muon_config(config.muon),
    )


def decode_optimizer_config(
    message: pb.OptimizerConfig, field: str = "optimizer"
) -> OptimizerConfig:
    """Decode the optimizer's settings."""
    for name in ("beta1", "beta2"):
        beta = getattr(message, name)
        if not 0 <= beta < 1:
            raise invalid(f"{field}.{name}", beta, f"is {beta}, outside [0, 1)")
    at_least(0, finite(message.lr, f"{field}.lr"), f"{field}.lr")
    return OptimizerConfig(
        type=OPTIMIZER_TYPE.decode(message.type, f"{field}.type"),
        lr=message.lr,
        betas=(message.beta1, message.beta2),
        eps=finite(message.eps, f"{field}.eps"),
        weight_decay=finite(message.weight_decay, f"{field}.weight_decay"),
        muon=decode_muon_config(message.muon, f"{field}.muon")
        if message.HasField("muon")
        else None,
    )


def encode_schedule_config(config: ScheduleConfig) -> pb.ScheduleConfig:
    """Encode the learning rate over time."""
    return pb.ScheduleConfig(
        name=config.name,
        total_steps=config.total_steps,
        warmup_ratio=config.warmup_ratio,
        min_lr_ratio=config.min_lr_ratio,
    )


def decode_schedule_config(message: pb.ScheduleConfig, field: str = "schedule") -> ScheduleConfig:
    """Decode the learning rate over time."""
    at_least(1, message.total_steps, f"{field}.total_steps")
    for name in ("warmup_ratio", "min_lr_ratio"):
        ratio = getattr(message, name)
        if not 0 <= ratio <= 1:
            raise invalid(f"{field}.{name}", ratio, f"is {ratio}, outside [0, 1]")
    return ScheduleConfig(
        name=present(message.name, f"{field}.name"),
        total_steps=message.total_steps,
        warmup_ratio=message.warmup_ratio,
        min_lr_ratio=message.min_lr_ratio,
    )


def encode_run_spec(spec: RunSpec, request_id: str = "") -> pb.StartRunRequest:
    """Encode what a run is; a call of StartRun needs the request_id as well."""
    return pb.StartRunRequest(
        request_id=request_id,
        run_id=spec.run_id,
        optimizer=encode_optimizer_config(spec.optimizer),
        schedule=encode_schedule_config(spec.schedule),
        max_norm=spec.max_norm,
        seed=spec.seed,
        full_determinism=spec.full_determinism,
        with_router_loss=spec.with_router_loss,
        ema_beta=spec.ema_beta,
    )


def decode_run_spec(message: pb.StartRunRequest) -> RunSpec:
    """Decode what a run is."""
    if not 0 <= message.ema_beta < 1:
        raise invalid("ema_beta", message.ema_beta, f"is {message.ema_beta}, outside [0, 1)")
    at_least(0, finite(message.max_norm, "max_norm"), "max_norm")
    return RunSpec(
        run_id=present(message.run_id, "run_id"),
        optimizer=decode_optimizer_config(message.optimizer),
        schedule=decode_schedule_config(message.schedule),
        max_norm=message.max_norm,
        seed=message.seed,
        full_determinism=message.full_determinism,
        with_router_loss=message.with_router_loss,
        ema_beta=message.ema_beta if message.HasField("ema_beta") else None,
    )


def encode_start_run_request(request: StartRunRequest) -> pb.StartRunRequest:
    """Encode a call of StartRun."""
    return encode_run_spec(request.spec, request.request_id)


def decode_start_run_request(message: pb.StartRunRequest) -> StartRunRequest:
    """Decode a call of StartRun."""
    return StartRunRequest(request_id=decode_request_id(message), spec=decode_run_spec(message))


def encode_start_run_result(result: StartRunResult) -> pb.StartRunResponse:
    """Encode the answer of StartRun."""
    return pb.StartRunResponse(
        optimizer_steps=result.optimizer_steps,
        resumed=result.resumed,
        num_parameters=result.num_parameters,
    )


def decode_start_run_result(message: pb.StartRunResponse) -> StartRunResult:
    """Decode the answer of StartRun."""
    return StartRunResult(
        optimizer_steps=message.optimizer_steps,
        resumed=message.resumed,
        num_parameters=message.num_parameters,
    )


def encode_save_checkpoint_request(request: SaveCheckpointRequest) -> pb.SaveCheckpointRequest:
    """Encode a call of SaveCheckpoint."""
    return pb.SaveCheckpointRequest(
        request_id=request.request_id,
        folder=request.folder,
        tag=request.tag,
        trainer_state=request.trainer_state,
    )


def decode_save_checkpoint_request(message: pb.SaveCheckpointRequest) -> SaveCheckpointRequest:
    """Decode a call of SaveCheckpoint."""
    return SaveCheckpointRequest(
        request_id=decode_request_id(message),
        folder=present(message.folder, "folder"),
        tag=_tag(present(message.tag, "tag")),
        trainer_state=message.trainer_state,
    )


def encode_save_checkpoint_result(result: SavedFolder) -> pb.SaveCheckpointResponse:
    """Encode where a checkpoint is."""
    return pb.SaveCheckpointResponse(path=result.path, size_bytes=result.size_bytes)


def decode_save_checkpoint_result(message: pb.SaveCheckpointResponse) -> SavedFolder:
    """Decode where a checkpoint is."""
    return SavedFolder(path=present(message.path, "path"), size_bytes=message.size_bytes)


def encode_load_checkpoint_request(request: LoadCheckpointRequest) -> pb.LoadCheckpointRequest:
    """Encode a call of LoadCheckpoint."""
    return pb.LoadCheckpointRequest(
        request_id=request.request_id, folder=request.folder, tag=request.tag
    )


def decode_load_checkpoint_request(message: pb.LoadCheckpointRequest) -> LoadCheckpointRequest:
    """Decode a call of LoadCheckpoint."""
    return LoadCheckpointRequest(
        request_id=decode_request_id(message),
        folder=present(message.folder, "folder"),
        tag=_tag(message.tag),
    )


def encode_load_checkpoint_result(result: LoadCheckpointResult) -> pb.LoadCheckpointResponse:
    """Encode which checkpoint was loaded."""
    return pb.LoadCheckpointResponse(
        tag=result.tag,
        optimizer_steps=result.optimizer_steps,
        trainer_state=result.trainer_state,
        run_id=result.run_id,
    )


def decode_load_checkpoint_result(message: pb.LoadCheckpointResponse) -> LoadCheckpointResult:
    """Decode which checkpoint was loaded."""
    return LoadCheckpointResult(
        tag=present(message.tag, "tag"),
        optimizer_steps=message.optimizer_steps,
        trainer_state=message.trainer_state,
        run_id=message.run_id,
    )


def encode_export_model_request(request: ExportModelRequest) -> pb.ExportModelRequest:
    """Encode a call of ExportModel."""
    return pb.ExportModelRequest(
        request_id=request.request_id,
        folder=request.folder,
        config_values=dict(request.config_values),
    )


def decode_export_model_request(message: pb.ExportModelRequest) -> ExportModelRequest:
    """Decode a call of ExportModel."""
    values = {
        name: finite(value, f"config_values[{name}]")
        for name, value in sorted(message.config_values.items())
    }
    return ExportModelRequest(
        request_id=decode_request_id(message),
        folder=present(message.folder, "folder"),
        config_values=values,
    )


def encode_export_model_result(result: SavedFolder) -> pb.ExportModelResponse:
    """Encode where an exported model is."""
    return pb.ExportModelResponse(path=result.path, size_bytes=result.size_bytes)


def decode_export_model_result(message: pb.ExportModelResponse) -> SavedFolder:
    """Decode where an exported model is."""
    return SavedFolder(path=present(message.path, "path"), size_bytes=message.size_bytes)


def encode_push_weights_request(request: PushWeightsRequest) -> pb.PushWeightsRequest:
    """Encode a call of PushWeights."""
    return pb.PushWeightsRequest(
        request_id=request.request_id,
        policy_version=request.policy_version,
        addresses=request.addresses,
        backend=PUSH_BACKEND.encode_or_unset(request.backend, "backend"),
        bucket_bytes=request.bucket_bytes,
        group_timeout=encode_duration(request.group_timeout),
        folder=request.folder,
    )


def decode_push_weights_request(message: pb.PushWeightsRequest) -> PushWeightsRequest:
    """Decode a call of PushWeights; what is unset takes the contract's default."""
    at_least(0, message.policy_version, "policy_version")
    at_least(0, message.bucket_bytes, "bucket_bytes")
    if not message.addresses:
        raise invalid("addresses", "[]", "is empty: nobody to push to")
    request = PushWeightsRequest(
        request_id=decode_request_id(message),
        policy_version=message.policy_version,
        addresses=tuple(message.addresses),
        backend=decode_push_backend(message.backend, "backend") if message.backend else None,
        folder=message.folder,
    )
    if message.bucket_bytes:
        request = replace(request, bucket_bytes=message.bucket_bytes)
    if message.HasField("group_timeout"):
        seconds = decode_duration(message.group_timeout, "group_timeout")
        request = replace(request, group_timeout=seconds)
    return request


def encode_push_result(result: PushResult) -> pb.PushWeightsResponse:
    """Encode the answer of PushWeights."""
    return pb.PushWeightsResponse(
        replicas=[encode_replica_push_result(replica) for replica in result.replicas],
        total_bytes=result.total_bytes,
        num_buckets=result.num_buckets,
        prepare_time=encode_duration(result.prepare_seconds),
        transfer_time=encode_duration(result.transfer_seconds),
        commit_time=encode_duration(result.commit_seconds),
        digest=result.digest,
        gather_time=encode_duration(result.gather_seconds),
        pack_time=encode_duration(result.pack_seconds),
        digest_time=encode_duration(result.digest_seconds),
        broadcast_time=encode_duration(result.broadcast_seconds),
    )


def decode_push_result(message: pb.PushWeightsResponse) -> PushResult:
    """Decode the answer of PushWeights."""
    return PushResult(
        replicas=tuple(
            decode_replica_push_result(m, f"replicas[{i}]") for i, m in enumerate(message.replicas)
        ),
        total_bytes=message.total_bytes,
        num_buckets=message.num_buckets,
        prepare_seconds=decode_duration(message.prepare_time, "prepare_time"),
        transfer_seconds=decode_duration(message.transfer_time, "transfer_time"),
        commit_seconds=decode_duration(message.commit_time, "commit_time"),
        digest=message.digest,
        gather_seconds=decode_duration(message.gather_time, "gather_time"),
        pack_seconds=decode_duration(message.pack_time, "pack_time"),
        digest_seconds=decode_duration(message.digest_time, "digest_time"),
        broadcast_seconds=decode_duration(message.broadcast_time, "broadcast_time"),
    )


def _tag(tag: str) -> str:
    """A checkpoint's name: one path component, so that nobody writes outside the folder."""
    if "/" in tag or tag in (".", ".."):
        raise invalid("tag", tag, f"is {tag!r}, not the name of one folder")
    return tag

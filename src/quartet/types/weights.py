"""What a weight push is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class PushBackend(StrEnum):
    """How the bytes of a push travel."""

    GLOO = "gloo"
    NCCL = "nccl"
    IPC = "ipc"
    FILE = "file"


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One tensor of a push, under the rollout engine's name."""

    name: str
    dtype: str
    """torch name without the prefix: "float32", "bfloat16", ..."""
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightManifest:
    """All tensors of a push in the order in which they are sent."""

    tensors: tuple[TensorSpec, ...]
    bucket_bytes: int = 64 << 20
    """Size at which a bucket closes."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Tied names: alias -> name of a tensor above."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IpcSegment:
    """Where a replica finds the memory of a push by ipc; see `quartet.weights.ipc`."""

    machine: str
    """Names the boot of the sender's machine."""
    size_bytes: int
    process_id: int = 0
    """Main memory: process of the sender."""
    descriptor: int = 0
    """Main memory: of a file in memory in that process."""
    inode: int = 0
    """Main memory: of that file."""
    gpu_uuid: str = ""
    """GPU whose memory it is; empty for main memory."""
    cuda_handle: bytes = b""
    """GPU: what cudaIpcGetMemHandle gave."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """Where the members of a broadcast group meet; which fields count depends on the backend."""

    store_address: str = ""
    """gloo, nccl: "host:port" that the sender bound and keeps open."""
    group_name: str = ""
    """gloo, nccl: prefix of this group's keys, new for every group ever formed."""
    folder: str = ""
    """file: folder that holds the safetensors files."""
    ipc_handles: Mapping[str, bytes] = field(default_factory=dict)
    """Left empty: `ipc` has taken its place."""
    ipc: IpcSegment | None = None
    """ipc: the memory that holds the weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiveEvent:
    """One event of a receive: "ready", "bucket", "done" or "failed"."""

    event: str
    bucket_index: int = 0
    digest: str = ""
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaPushResult:
    """What became of one replica in a push."""

    address: str
    replica: str = ""
    committed: bool = False
    failed_phase: str = ""
    """prepare, receive or commit; empty when committed."""
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PushResult:
    """Answer of PushWeights."""

    replicas: tuple[ReplicaPushResult, ...]
    total_bytes: int = 0
    num_buckets: int = 0
    prepare_seconds: float = 0.0
    transfer_seconds: float = 0.0
    commit_seconds: float = 0.0
    digest: str = ""
    gather_seconds: float = 0.0
    """This and those below: summed over the buckets. They run beside one another."""
    pack_seconds: float = 0.0
    digest_seconds: float = 0.0
    broadcast_seconds: float = 0.0
    """Buckets on their way, or being written to files."""

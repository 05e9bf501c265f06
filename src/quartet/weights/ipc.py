"""A push through memory that sender and replicas share: of one machine, or of one GPU.

The sender makes one block with room for all buckets and says in Prepare where it is. It writes all
of it, and only then lets the replicas read, each for itself: there is nothing that one of them
could hold up for another. A replica stages nothing: the block is the staging area of all of them.

Main memory is a file in memory without a name (memfd), which a replica opens through the sender's
entry in /proc. The system frees it with the last process that holds it, however that one ends. A
GPU's memory is shared by CUDA handles; see cuda_ipc.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from quartet.errors import InfraError, RequestError
from quartet.types import IpcSegment
from quartet.weights.manifest import Bucket
from quartet.weights.tensors import torch_dtype

if TYPE_CHECKING:
    import torch

ALIGNMENT = 256
"""Bytes: each bucket begins at a multiple of it. The wire says so."""

_BOOT = "/proc/sys/kernel/random/boot_id"
_OTHER_WAY = "or take --push.backend gloo, nccl or file"


class Segment(Protocol):
    """One block of shared memory, as one side sees it."""

    @property
    def handle(self) -> IpcSegment:
        """Where others find it."""
        ...

    @property
    def freed_by_others(self) -> bool:
        """True when it lasts as long as anybody has it open, False when the sender frees it."""
        ...

    def bytes(self) -> torch.Tensor:
        """All of it, uint8 [size]. A tensor of main memory may outlive the segment."""
        ...

    def settle(self) -> None:
        """Wait until all that was asked of the device is done with it."""
        ...

    def close(self) -> None:
        """Let go of it. A second time does nothing."""
        ...


def segment_layout(buckets: Sequence[Bucket]) -> tuple[tuple[int, ...], int]:
    """First byte of each bucket in the block, and the size of the block, at least 1."""
    starts: list[int] = []
    end = 0
    for bucket in buckets:
        starts.append(-(-end // ALIGNMENT) * ALIGNMENT)
        end = starts[-1] + bucket.nbytes
    return tuple(starts), max(end, 1)


def make_segment(buckets: Sequence[Bucket], device: str) -> Segment:
    """Make the sender's block. Blocks.

    Args:
        buckets: What it has to hold.
        device: Where the weights are: "cpu", "cuda" or "cuda:0".

    Raises:
        InfraError: No room for it, or the system cannot share memory in this way.
    """
    _, size = segment_layout(buckets)
    if device.startswith("cuda"):
        from quartet.weights.cuda_ipc import CudaSegment

        return CudaSegment(size, device)
    return HostSegment(size)


def open_segment(handle: IpcSegment, needed: int) -> Segment:
    """Open the sender's block in a replica. Blocks.

    Args:
        handle: Where it is.
        needed: Bytes that the manifest asks for.

    Raises:
        RequestError: This process cannot see that memory, or it is too small.
    """
    if handle.size_bytes < needed:
        raise RequestError(
            f"the memory of this push has {handle.size_bytes} bytes, its manifest needs {needed}",
            reason="WEIGHTS_IPC_TOO_SMALL",
            field="rendezvous.ipc.size_bytes",
            value=str(handle.size_bytes),
            remedy="lay the buckets out as docs/weights.md says",
        )
    here = machine_name()
    if handle.machine != here:
        raise out_of_reach(
            "the sender's memory is on another machine",
            f"start this replica on the sender's machine, {_OTHER_WAY}",
        )
    if handle.gpu_uuid:
        from quartet.weights.cuda_ipc import OpenedCudaSegment

        return OpenedCudaSegment(handle)
    return OpenedHostSegment(handle)


def machine_name() -> str:
    """Names this boot of this machine; containers on it share the name."""
    with open(_BOOT) as file:
        return file.read().strip()


def out_of_reach(why: str, remedy: str = "") -> RequestError:
    """A replica cannot see the sender's memory."""
    return RequestError(
        why,
        reason="WEIGHTS_IPC_OUT_OF_REACH",
        field="rendezvous.ipc",
        remedy=remedy
        or "run learner and replica as one user, in one container or with a shared process "
        f"namespace (docker run --pid), {_OTHER_WAY}",
    )


class HostSegment:
    """Main memory of the sender.

    Its whole size is taken at once, so that a lack of memory is told here and not met later.
    """

    def __init__(self, size: int) -> None:
        """Reserve `size` bytes; raises InfraError without room for them."""
        try:
            descriptor = os.memfd_create("quartet-push", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except (OSError, AttributeError) as error:
            raise InfraError(
                f"this system makes no files in memory: {error}",
                reason="WEIGHTS_IPC_UNAVAILABLE",
                remedy="take --push.backend gloo",
            ) from error
        self._file = os.fdopen(descriptor, "r+b", buffering=0)
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            self._file.close()
            raise InfraError(
                f"no room for {size / 2**30:.2f} GiB of shared memory: {error.strerror}",
                reason="WEIGHTS_NO_SPACE",
                remedy="give the learner more memory, or take --push.backend gloo",
            ) from error
        # A file that gets shorter kills whoever has it mapped.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._size = size
        self._bytes: torch.Tensor | None = _as_tensor(mmap.mmap(descriptor, size))
        self.handle = IpcSegment(
            machine=machine_name(),
            size_bytes=size,
            process_id=os.getpid(),
            descriptor=descriptor,
            inode=os.fstat(descriptor).st_ino,
        )
        self.freed_by_others = True

    def bytes(self) -> torch.Tensor:
        """To be written."""
        assert self._bytes is not None, "it is closed"
        return self._bytes

    def settle(self) -> None:
        """Main memory has no queue."""

    def close(self) -> None:
        """Let go; who has it open keeps it."""
        self._bytes = None
        self._file.close()


class OpenedHostSegment:
    """The sender's main memory in a replica. What is written to it here, nobody else sees."""

    def __init__(self, handle: IpcSegment) -> None:
        """Open it; raises RequestError where that cannot be done, or it is another file."""
        path = f"/proc/{handle.process_id}/fd/{handle.descriptor}"
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by close
        except OSError as error:
            raise out_of_reach(f"the sender's memory cannot be opened: {error}") from error
        found = os.fstat(self._file.fileno())
        if (found.st_ino, found.st_size) != (handle.inode, handle.size_bytes):
            self._file.close()
            raise out_of_reach(
                f"{path} is not the sender's memory here: its processes are not those that this "
                "replica sees"
            )
        self.handle = handle
        self.freed_by_others = True
        self._bytes: torch.Tensor | None = None

    def bytes(self) -> torch.Tensor:
        """Map it at the first use: the sender has written all by then."""
        if self._file.closed:
            raise InfraError("the sender's memory is gone", reason="WEIGHTS_IPC_GONE")
        if self._bytes is None:
            size = self.handle.size_bytes
            self._bytes = _as_tensor(mmap.mmap(self._file.fileno(), size, access=mmap.ACCESS_COPY))
        return self._bytes

    def settle(self) -> None:
        """Main memory has no queue."""

    def close(self) -> None:
        """Let go; tensors that are in use keep the memory."""
        self._bytes = None
        self._file.close()


class IpcTransport:
    """Buckets through one block: written by the sender, or copied out of it by a replica."""

    def __init__(
        self,
        segment: Segment,
        buckets: Sequence[Bucket],
        *,
        let_go: Callable[[], None] | None = None,
    ) -> None:
        """`let_go` is what `close` does; None closes the block."""
        self._segment = segment
        self._let_go = let_go or segment.close
        self._starts, _ = segment_layout(buckets)

    def flat(self, bucket: Bucket) -> torch.Tensor:
        """The place of a bucket in the block, [numel]."""
        start = self._starts[bucket.index]
        part = self._segment.bytes()[start : start + bucket.nbytes]
        return part.view(torch_dtype(bucket.dtype))

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Copy a bucket into the block."""
        self.flat(bucket).copy_(flat.detach())
        self._segment.settle()

    def receive(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Copy a bucket out of the block."""
        flat.copy_(self.flat(bucket))
        self._segment.settle()

    def close(self, *, abort: bool = False) -> None:
        """Let go of the block; `abort` changes nothing here."""
        self._let_go()


class Retained:
    """Blocks that a replica may still read although its push is over.

    A replica that stood still says nothing, and memory of a GPU must not be freed while it is open
    elsewhere. So the block stays until that replica answers the Prepare of a later push, which ends
    the old one there, or is not among the replicas any more.
    """

    def __init__(self) -> None:
        self._held: list[tuple[Segment, set[str]]] = []

    def __len__(self) -> int:
        """Blocks that are held."""
        return len(self._held)

    def hold(self, segment: Segment, readers: set[str]) -> None:
        """Close a block now, or when none of the replicas at these addresses may read it."""
        if segment.freed_by_others or not readers:
            segment.close()
        else:
            self._held.append((segment, readers))

    def release(self, *, asked: set[str], answered: set[str]) -> None:
        """Let go of what nobody reads, as the replicas of a later push show.

        Args:
            asked: Addresses that were asked to prepare.
            answered: Those of them that did.
        """
        still: list[tuple[Segment, set[str]]] = []
        for segment, readers in self._held:
            left = (readers & asked) - answered
            if left:
                still.append((segment, left))
            else:
                segment.close()
        self._held = still


def _as_tensor(memory: mmap.mmap) -> torch.Tensor:
    import torch

    with contextlib.suppress(OSError, AttributeError, ValueError):
        memory.madvise(mmap.MADV_HUGEPAGE)  # fewer faults, where the system is set up for it
    return torch.frombuffer(memory, dtype=torch.uint8)

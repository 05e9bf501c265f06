"""A broadcast group outside torch.distributed's default world.

The sender binds a key-value store to a free port and keeps it open; every group ever formed gets
a prefix of its own in it, so that a failed attempt cannot be met by a late member. The default
group, DeepSpeed's groups and MASTER_ADDR are never touched. Every wait has a deadline.

Not run on a GPU: the nccl branch is written after torch's documentation and sources, and only its
gloo twin is exercised by the tests.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from quartet.errors import ConfigError, DeadlineError, InfraError
from quartet.types import PushBackend
from quartet.weights.worker import Worker

if TYPE_CHECKING:
    import torch
    from torch.distributed import PrefixStore, TCPStore

_environment = threading.Lock()
_NCCL_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_NCCL_WATCHDOG = timedelta(days=1)


class SenderStore:
    """The key-value store that a sender binds and that members of its groups meet in."""

    def __init__(self, host: str, *, timeout: float) -> None:
        """Bind a free port of `host`, an address of this machine ("" is all of them)."""
        from torch.distributed import TCPStore

        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family) as bound:
            self.port: int = bound.getsockname()[1]
            # The store owns a duplicate: the port is bound from here on without a gap.
            self.store: TCPStore = TCPStore(
                host or "127.0.0.1",
                self.port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout),
                master_listen_fd=os.dup(bound.fileno()),
            )

    def address(self, host: str) -> str:
        """Where a member that reaches this machine as `host` finds the store."""
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


def join_address(address: str) -> tuple[str, int]:
    """Split "host:port" or "[v6]:port"."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def connect_store(address: str, *, timeout: float) -> TCPStore:
    """Connect to a sender's store, or raise InfraError within `timeout` seconds."""
    from torch.distributed import DistError, TCPStore

    try:
        host, port = join_address(address)
        return TCPStore(
            host,
            port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
        )
    except (DistError, RuntimeError, ValueError) as error:
        raise InfraError(
            f"cannot reach the sender's store at {address}: {_first_line(error)}",
            reason="WEIGHTS_STORE_UNREACHABLE",
            remedy="open the learner's ports to the rollout replicas",
        ) from error


class BroadcastGroup:
    """Members of one push; rank 0 sends.

    Attributes:
        device: where broadcast buffers must lie.
    """

    def __init__(self, backend: PushBackend, members: Any, timeout: float, device: str) -> None:
        self.backend = backend
        self.device = device
        self._members: Any = members
        self._timeout = timedelta(seconds=timeout)

    def broadcast(self, flat: torch.Tensor) -> None:
        """Send (rank 0) or fill (others) a flat buffer. Blocks up to the group's timeout.

        Raises:
            DeadlineError: A member did not take part in time.
            InfraError: A member is gone.
        """
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._timeout
        try:
            work = self._members.broadcast([flat], options)
            if self.backend is PushBackend.NCCL:
                _wait_on_device(work, flat)
            else:
                work.wait()
        except RuntimeError as error:
            raise _group_error("the broadcast", error, self._timeout) from error

    def close(self, *, abort: bool = False) -> None:
        """Drop the group. Returns at once, also when a member is stuck in it.

        Args:
            abort: Give up what is under way. NCCL then frees its thread and its kernels; gloo
                does so only at its timeout.
        """
        members, self._members = self._members, None
        reaper = Worker("quartet-group-reaper")
        if abort and self.backend is PushBackend.NCCL and members is not None:
            reaper.submit(members.abort)
        # A gloo group's destructor waits for the operation under way: never here.
        reaper.submit(_drop, [members])
        reaper.close()


def form_group(
    *,
    backend: PushBackend,
    store: TCPStore,
    group_name: str,
    rank: int,
    world_size: int,
    host: str,
    timeout: float,
    device: str = "cpu",
) -> BroadcastGroup:
    """Meet the other members; returns when all are there.

    Args:
        backend: gloo or nccl.
        store: The sender's store.
        group_name: New for every group ever formed.
        rank: Place of this member; the sender is 0.
        world_size: Members in all.
        host: Address of this machine that the other members reach (gloo listens there).
        timeout: Seconds to wait for the others here, and in each later broadcast.
        device: CUDA device of this member (nccl).

    Raises:
        DeadlineError: Not all members came in time.
        InfraError: A member broke off.
    """
    from torch.distributed import PrefixStore

    keys = PrefixStore(group_name, store)
    keys.set_timeout(timedelta(seconds=timeout))
    keys.set(arrival_key(rank), "1")
    try:
        if backend is PushBackend.GLOO:
            members = _gloo(keys, rank, world_size, host, timeout)
            return BroadcastGroup(backend, members, timeout, "cpu")
        if backend is PushBackend.NCCL:
            return BroadcastGroup(backend, _nccl(keys, rank, world_size, device), timeout, device)
    except RuntimeError as error:
        raise _group_error("forming the group", error, timedelta(seconds=timeout)) from error
    raise ConfigError(
        f"push.backend {backend} forms no group", field="push.backend", remedy="use gloo or nccl"
    )


def arrival_key(rank: int) -> str:
    """Key that a member sets before it waits: tells the sender who is late from who waits."""
    return f"arrived/{rank}"


def local_address_towards(host: str, port: int) -> str:
    """The address of this machine on the way to `host`. Sends nothing."""
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, target = infos[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


def _gloo(keys: PrefixStore, rank: int, world_size: int, host: str, timeout: float) -> Any:
    from torch.distributed import ProcessGroupGloo

    gloo: Any = ProcessGroupGloo  # torch's stubs lack the options that its own code uses
    options = gloo._Options()
    # Without a device gloo listens on whatever the machine's host name resolves to.
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout)
    return gloo(keys, rank, world_size, options)


def _nccl(keys: PrefixStore, rank: int, world_size: int, device: str) -> Any:
    import torch

    try:
        from torch.distributed import ProcessGroupNCCL
    except ImportError as error:
        raise ConfigError(
            "push.backend nccl needs a torch that is built with NCCL",
            field="push.backend",
            value="nccl",
            remedy="use gloo on machines without a GPU",
        ) from error
    torch.cuda.set_device(device)  # this thread's device: NCCL communicators form on it
    options = ProcessGroupNCCL.Options()
    # Our own deadline aborts the group. torch's watchdog would end the whole process instead.
    options._timeout = _NCCL_WATCHDOG
    with _nccl_errors_left_to_us():
        members: Any = ProcessGroupNCCL(keys, rank, world_size, options)
    # Communicators form at the first operation: do it here, where waiting is expected.
    warm_up = torch.ones(1, device=device)
    work = members.allreduce([warm_up])
    _wait_on_device(work, warm_up)
    return members


@contextlib.contextmanager
def _nccl_errors_left_to_us() -> Iterator[None]:
    """Let ProcessGroupNCCL's constructor read "no handling": a dead replica is no reason to die."""
    with _environment:
        before = os.environ.get(_NCCL_ERROR_HANDLING)
        os.environ[_NCCL_ERROR_HANDLING] = "0"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_NCCL_ERROR_HANDLING]
            else:
                os.environ[_NCCL_ERROR_HANDLING] = before


def _wait_on_device(work: Any, buffer: torch.Tensor) -> None:
    """Wait until a NCCL operation is done on the device, not only enqueued."""
    import torch

    work.wait()
    torch.cuda.current_stream(buffer.device).synchronize()
    if (error := work.exception()) is not None:
        raise RuntimeError(str(error))


def _drop(holder: list[Any]) -> None:
    holder.clear()


def _group_error(what: str, error: RuntimeError, timeout: timedelta) -> InfraError:
    text = _first_line(error)
    late = any(mark in text.lower() for mark in ("timed out", "timeout"))
    if late:
        return DeadlineError(
            f"{what} was not done in {timeout.total_seconds():g} s: {text}",
            reason="WEIGHTS_GROUP_TIMEOUT",
        )
    return InfraError(f"{what} failed: {text}", reason="WEIGHTS_GROUP_BROKEN")


def _first_line(error: Exception) -> str:
    """Cut torch's text: a source location comes before its sentence, a stack after it."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return text.split("] ", 1)[1] if text.startswith("[/") and "] " in text else text

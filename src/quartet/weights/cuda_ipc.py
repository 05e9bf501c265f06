"""Memory of a GPU that several processes share, by the handles of the CUDA runtime.

Not torch's own sharing of tensors: that counts readers in a file in /dev/shm which outlives a
killed sender, and keeps the memory of a block for good when a reader was killed before it let go.
Here the protocol of the push says when a block may be freed. The block is not in torch's pool
either: it is one cudaMalloc, so that its handle stands for it alone.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from functools import cache
from typing import TYPE_CHECKING, Any

from quartet.errors import InfraError
from quartet.types import IpcSegment
from quartet.weights.ipc import machine_name, out_of_reach

if TYPE_CHECKING:
    import torch

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_OUT_OF_MEMORY = 2


class Handle(ctypes.Structure):
    """cudaIpcMemHandle_t, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaError(Exception):
    """A call of the CUDA runtime failed.

    Attributes:
        code: cudaError_t.
    """

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call}: {text} ({code})")
        self.code = code


class CudaRuntime:
    """The five calls of libcudart that are needed. All act on the thread's current device."""

    def __init__(self, library: Any) -> None:
        """Take a loaded libcudart, or something with the same functions."""
        self._library = library
        library.cudaMalloc.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t)
        library.cudaFree.argtypes = (ctypes.c_void_p,)
        library.cudaIpcGetMemHandle.argtypes = (ctypes.POINTER(Handle), ctypes.c_void_p)
        library.cudaIpcOpenMemHandle.argtypes = (
            ctypes.POINTER(ctypes.c_void_p),
            Handle,
            ctypes.c_uint,
        )
        library.cudaIpcCloseMemHandle.argtypes = (ctypes.c_void_p,)
        library.cudaGetErrorString.argtypes = (ctypes.c_int,)
        library.cudaGetErrorString.restype = ctypes.c_char_p

    def allocate(self, size: int) -> int:
        """Address of `size` new bytes."""
        pointer = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(pointer), size)
        return pointer.value or 0

    def free(self, pointer: int) -> None:
        """Give memory back."""
        self._call("cudaFree", ctypes.c_void_p(pointer))

    def export(self, pointer: int) -> bytes:
        """The handle of memory that `allocate` made."""
        handle = Handle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(pointer))
        return bytes(handle.reserved)

    def open(self, handle: bytes) -> int:
        """Address of another process's memory in this one."""
        pointer = ctypes.c_void_p()
        value = Handle.from_buffer_copy(handle)
        self._call("cudaIpcOpenMemHandle", ctypes.byref(pointer), value, _LAZY_PEER_ACCESS)
        return pointer.value or 0

    def close(self, pointer: int) -> None:
        """Let go of another process's memory."""
        self._call("cudaIpcCloseMemHandle", ctypes.c_void_p(pointer))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            # Else torch's next call would find this error and take it for its own.
            self._library.cudaGetLastError()
            text = (self._library.cudaGetErrorString(code) or b"").decode()
            raise CudaError(name, code, text)


@cache
def cuda_runtime() -> CudaRuntime:
    """The libcudart that torch has loaded; another one of the system shares its context too."""
    import torch

    major = (torch.version.cuda or "12").split(".")[0]
    names = [f"libcudart.so.{major}", ctypes.util.find_library("cudart") or "libcudart.so"]
    for name in names:
        try:
            return CudaRuntime(ctypes.CDLL(name))
        except OSError:
            continue
    raise InfraError(
        f"the library {names[0]} is not here",
        reason="WEIGHTS_IPC_UNAVAILABLE",
        remedy="install the CUDA runtime that torch is built for, or take --push.backend gloo",
    )


class CudaSegment:
    """Memory of the sender's GPU."""

    def __init__(self, size: int, device: str) -> None:
        """Reserve `size` bytes on `device`; raises InfraError without room for them."""
        import torch

        self._index = torch.device(device).index or 0
        with torch.cuda.device(self._index):
            torch.cuda.empty_cache()  # what torch keeps for later is taken where CUDA looks
            try:
                self._pointer = cuda_runtime().allocate(size)
            except CudaError as error:
                raise _no_memory(size, error) from error
            try:
                exported = cuda_runtime().export(self._pointer)
            except CudaError as error:
                cuda_runtime().free(self._pointer)
                raise InfraError(
                    f"this GPU's memory cannot be shared: {error}",
                    reason="WEIGHTS_IPC_UNAVAILABLE",
                    remedy="take --push.backend gloo",
                ) from error
        self._size = size
        self.handle = IpcSegment(
            machine=machine_name(),
            size_bytes=size,
            gpu_uuid=gpu_uuid(self._index),
            cuda_handle=exported,
        )
        self.freed_by_others = False

    def bytes(self) -> torch.Tensor:
        """To be written."""
        return _tensor_at(self._pointer, self._size, self._index)

    def settle(self) -> None:
        """Wait for this thread's work on the GPU."""
        import torch

        torch.cuda.current_stream(self._index).synchronize()

    def close(self) -> None:
        """Free it."""
        import torch

        pointer, self._pointer = self._pointer, 0
        if pointer:
            with torch.cuda.device(self._index):
                cuda_runtime().free(pointer)


class OpenedCudaSegment:
    """The sender's memory of a GPU in a replica. Read-only by agreement."""

    def __init__(self, handle: IpcSegment) -> None:
        """Open it; raises RequestError where this process does not see that GPU."""
        import torch

        self.handle = handle
        self.freed_by_others = False
        self._index = _index_of(handle.gpu_uuid)
        with torch.cuda.device(self._index):
            try:
                self._pointer = cuda_runtime().open(handle.cuda_handle)
            except CudaError as error:
                raise out_of_reach(f"the sender's memory cannot be opened: {error}") from error

    def bytes(self) -> torch.Tensor:
        """All of it; a tensor of it is good until `close`."""
        return _tensor_at(self._pointer, self.handle.size_bytes, self._index)

    def settle(self) -> None:
        """Wait for all that reads it: a commit's copies are queued on the engine's streams."""
        import torch

        torch.cuda.synchronize(self._index)

    def close(self) -> None:
        """Let go of it."""
        import torch

        pointer, self._pointer = self._pointer, 0
        if pointer:
            with torch.cuda.device(self._index):
                cuda_runtime().close(pointer)


class _AtAddress:
    """Memory at an address, as torch and others take it."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


def gpu_uuid(index: int) -> str:
    """The uuid of a GPU that this process sees as number `index`."""
    import torch

    return str(torch.cuda.get_device_properties(index).uuid)


def _index_of(uuid: str) -> int:
    """Number of a GPU in this process: every process may see others, in another order."""
    import torch

    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(seen):
        if gpu_uuid(index) == uuid:
            return index
    raise out_of_reach(
        f"the sender's memory is on GPU {uuid}, which is not among the {seen} that this replica "
        "sees",
        "put learner and replica on one GPU (--train.colocate_all with one GPU), or take "
        "--push.backend nccl or gloo",
    )


def _tensor_at(pointer: int, size: int, index: int) -> torch.Tensor:
    import torch

    return torch.as_tensor(_AtAddress(pointer, size), device=f"cuda:{index}")


def _no_memory(size: int, error: CudaError) -> InfraError:
    if error.code != _OUT_OF_MEMORY:
        return InfraError(f"no memory of the GPU: {error}", reason="WEIGHTS_IPC_UNAVAILABLE")
    return InfraError(
        f"no room for {size / 2**30:.2f} GiB of weights on the GPU beside learner and engine",
        reason="WEIGHTS_NO_SPACE",
        remedy="give the engine a smaller share of the memory, or let it sleep while the policy "
        "trains (--vllm.enable_sleep)",
    )

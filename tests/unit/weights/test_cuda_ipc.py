"""Shared memory of a GPU, with a runtime that is played: what is asked of it, and what is freed."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace

import pytest

from quartet.errors import InfraError, RequestError
from quartet.weights import cuda_ipc
from quartet.weights.cuda_ipc import CudaRuntime, CudaSegment, Handle, OpenedCudaSegment

OUT_OF_MEMORY, NOT_SUPPORTED = 2, 801


class Library:
    """libcudart's functions: blocks by address, handles that hold the address."""

    def __init__(self):
        self.blocks = {}
        self.opened = set()
        self.errors_taken = 0
        self.fails = {}
        self._next = 0x7F00_0000_0000
        for name in (
            "cudaMalloc",
            "cudaFree",
            "cudaIpcGetMemHandle",
            "cudaIpcOpenMemHandle",
            "cudaIpcCloseMemHandle",
        ):
            setattr(self, name, self._function(name))
        self.cudaGetErrorString = self._plain(lambda code: b"error of the runtime")
        self.cudaGetLastError = self._take_error

    def _function(self, name):
        def call(*arguments):
            return self.fails.get(name, 0) or getattr(self, f"_{name}")(*arguments)

        return call

    @staticmethod
    def _plain(function):
        def call(*arguments):
            return function(*arguments)

        return call

    def _take_error(self):
        self.errors_taken += 1

    def _cudaMalloc(self, pointer, size):
        self._next += 1 << 32
        self.blocks[self._next] = size
        pointer._obj.value = self._next
        return 0

    def _cudaFree(self, pointer):
        del self.blocks[pointer.value]
        return 0

    def _cudaIpcGetMemHandle(self, handle, pointer):
        ctypes.memmove(handle, pointer.value.to_bytes(8, "little"), 8)
        return 0

    def _cudaIpcOpenMemHandle(self, pointer, handle, flags):
        address = int.from_bytes(bytes(handle.reserved)[:8], "little")
        assert address in self.blocks
        pointer._obj.value = address + 1
        self.opened.add(address + 1)
        return 0

    def _cudaIpcCloseMemHandle(self, pointer):
        self.opened.remove(pointer.value)
        return 0


@pytest.fixture
def library(monkeypatch):
    """Two GPUs, and a runtime on them."""
    played = Library()
    monkeypatch.setattr(cuda_ipc, "cuda_runtime", lambda: runtime)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda index: SimpleNamespace(uuid=f"gpu-{index}")
    )
    runtime = CudaRuntime(played)
    return played


def test_a_block_is_opened_where_its_gpu_is_and_both_sides_let_go(library):
    sender = CudaSegment(1000, "cuda:1")
    assert sender.handle.gpu_uuid == "gpu-1"
    assert sender.handle.size_bytes == 1000
    assert len(sender.handle.cuda_handle) == ctypes.sizeof(Handle) == 64
    assert not sender.freed_by_others
    replica = OpenedCudaSegment(sender.handle)
    assert library.opened
    for _ in range(2):  # a second close does nothing
        replica.close()
        sender.close()
    assert not library.opened
    assert not library.blocks


def test_a_gpu_that_is_not_seen_is_refused_with_a_remedy(library, monkeypatch):
    handle = CudaSegment(1000, "cuda:1").handle
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(RequestError, match=r"GPU gpu-1.*1 that this replica sees") as caught:
        OpenedCudaSegment(handle)
    assert caught.value.info.reason == "WEIGHTS_IPC_OUT_OF_REACH"
    assert "--push.backend" in caught.value.info.remedy


def test_no_room_on_the_gpu_is_told_in_bytes(library):
    library.fails["cudaMalloc"] = OUT_OF_MEMORY
    with pytest.raises(InfraError, match=r"no room for 2\.00 GiB") as caught:
        CudaSegment(2 << 30, "cuda")
    assert caught.value.info.reason == "WEIGHTS_NO_SPACE"
    assert library.errors_taken == 1, "torch's next call would meet this error"


def test_memory_that_cannot_be_shared_is_freed_again(library):
    library.fails["cudaIpcGetMemHandle"] = NOT_SUPPORTED
    with pytest.raises(InfraError, match="cannot be shared") as caught:
        CudaSegment(1000, "cuda")
    assert caught.value.info.reason == "WEIGHTS_IPC_UNAVAILABLE"
    assert not library.blocks


def test_a_handle_that_does_not_open_is_out_of_reach(library):
    handle = CudaSegment(1000, "cuda").handle
    library.fails["cudaIpcOpenMemHandle"] = NOT_SUPPORTED
    with pytest.raises(RequestError, match="cannot be opened: cudaIpcOpenMemHandle"):
        OpenedCudaSegment(handle)

"""A device's memory that processes share, in host memory: all of cuda_ipc but the driver's calls
runs on it."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import torch

from baton.types import KvLayout
from engine.kv.tensors.array import ArrayKvPool
from engine.kv.tensors.copy_order import HostOrder
from engine.kv.tensors.device_copy import PagedDeviceCopy

_HANDLE_BYTES = 64


class DoubleArea:
    """See kv_transfer.device_memory.DeviceArea. What a part gives after the end fails a test, as a
    read of freed memory would."""

    def __init__(self, memory: DoubleMemory, fd: int, num_bytes: int, handle: bytes) -> None:
        self.handle = handle
        self._memory = memory
        self._fd = fd
        self._map: mmap.mmap | None = mmap.mmap(fd, num_bytes)
        self.address: int = np.frombuffer(self._map, np.uint8).ctypes.data

    def part(self, start: int, num_bytes: int) -> torch.Tensor:
        assert self._map is not None, "memory that is freed or unmapped"
        assert start + num_bytes <= len(self._map)
        array = np.frombuffer(self._map, np.uint8, num_bytes, start)
        return torch.from_numpy(array)

    def close(self) -> None:
        assert self._map is not None, "freed or unmapped twice"
        self._map = None
        os.close(self._fd)
        self._memory.forget(self)


class DoubleMemory:
    """See kv_transfer.device_memory.DeviceMemory. A handle names a file of the process that
    allocated it."""

    device_number = 3

    def __init__(self) -> None:
        self.allocated: list[DoubleArea] = []
        self.opened: list[DoubleArea] = []

    def allocate(self, num_bytes: int) -> DoubleArea:
        fd = os.memfd_create("device", os.MFD_CLOEXEC)
        os.truncate(fd, num_bytes)
        handle = f"{os.getpid()} {fd}".encode().ljust(_HANDLE_BYTES, b"\0")
        self.allocated.append(DoubleArea(self, fd, num_bytes, handle))
        return self.allocated[-1]

    def open(self, handle: bytes, num_bytes: int) -> DoubleArea:
        process, _, number = handle.rstrip(b"\0").decode().partition(" ")
        fd = os.open(Path("/proc", process, "fd", number), os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(fd).st_size < num_bytes:
            os.close(fd)
            raise OSError("the memory is smaller than was told")
        self.opened.append(DoubleArea(self, fd, num_bytes, b""))
        return self.opened[-1]

    def forget(self, area: DoubleArea) -> None:
        (self.allocated if area.handle else self.opened).remove(area)


class DeviceArrayPool(ArrayKvPool):
    """A pool in host memory with a device that claims to share memory."""

    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        super().__init__(layout, num_blocks)
        self.memory = DoubleMemory()
        blocks = torch.from_numpy(self.data.view(np.uint8)).flatten(-2)
        self.device_copy = PagedDeviceCopy(layout, blocks, HostOrder(), self.memory)

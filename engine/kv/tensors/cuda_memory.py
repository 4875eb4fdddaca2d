"""CUDA device memory that other processes on this host can map, by calls of the CUDA driver.

torch's own handles are not used: they refer to places in its allocator's pools and need files that
count users. Here each area is one allocation in multiples of GRAIN_BYTES, because smaller ones may
share a page: a handle gives access to that area only. Requires libcuda.so.1 of CUDA 11 or later.

NOT YET RUN ON A GPU. Tests use a stand-in for the driver.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

#: Size of CUipcMemHandle.
HANDLE_BYTES = 64
#: CUDA programming guide, "Interprocess Communication": only multiples of 2 MiB are sure not to
#: share other allocations.
GRAIN_BYTES = 2 << 20
_LAZY_PEER_ACCESS = 1

_log = logging.getLogger(__name__)


class _Handle(ctypes.Structure):
    """CUipcMemHandle, passed by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


_SIZE, _ADDRESS = ctypes.c_size_t, ctypes.c_uint64
_CALLS = {
    "cuMemAlloc_v2": (ctypes.POINTER(_ADDRESS), _SIZE),
    "cuMemFree_v2": (_ADDRESS,),
    "cuIpcGetMemHandle": (ctypes.POINTER(_Handle), _ADDRESS),
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(_ADDRESS), _Handle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (_ADDRESS,),
}


class CudaDriver:
    """Memory calls of the driver, for the calling thread's current device. Raises OSError with the
    name of the call and its CUresult."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        self._library = ctypes.CDLL(library)
        for name, arguments in _CALLS.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int

    def allocate(self, num_bytes: int) -> int:
        """Allocate memory; returns its address."""
        address = _ADDRESS()
        self._call("cuMemAlloc_v2", ctypes.byref(address), num_bytes)
        return address.value

    def free(self, address: int) -> None:
        """Free memory. No other process may have it mapped."""
        self._call("cuMemFree_v2", address)

    def handle(self, address: int) -> bytes:
        """Handle by which other processes open memory allocated here."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Map another process's memory; returns its address."""
        if len(handle) != HANDLE_BYTES:
            raise OSError(f"a handle of {len(handle)} bytes")
        address = _ADDRESS()
        copied = _Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), copied, _LAZY_PEER_ACCESS)
        return address.value

    def close(self, address: int) -> None:
        """Unmap memory mapped by open."""
        self._call("cuIpcCloseMemHandle", address)

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self._library, name)(*arguments)
        if result:
            raise OSError(f"{name} failed with CUresult {result}")


class CudaArea:
    """See kv_transfer.device_memory.DeviceArea."""

    def __init__(self, data: torch.Tensor, handle: bytes, release: Callable[[], None]) -> None:
        """data: uint8. release: frees or unmaps it."""
        self.handle = handle
        self.address: int = data.data_ptr()
        self._data = data
        self._release = release

    def part(self, start: int, num_bytes: int) -> torch.Tensor:
        return self._data[start : start + num_bytes]

    def close(self) -> None:
        self._data = self._data[:0]
        self._release()


class CudaMemory:
    """See kv_transfer.device_memory.DeviceMemory. Memory of one device, by its number in this
    process."""

    def __init__(self, device: torch.device, driver: CudaDriver) -> None:
        self._device = device
        self._driver = driver

    @property
    def device_number(self) -> int:
        index = self._device.index
        return torch.cuda.current_device() if index is None else index

    def allocate(self, num_bytes: int) -> CudaArea:
        driver = self._driver
        with self._current():
            address = driver.allocate(-(-num_bytes // GRAIN_BYTES) * GRAIN_BYTES)
            with self._undone(driver.free, address):
                handle = driver.handle(address)
                return self._area(address, num_bytes, handle, driver.free)

    def open(self, handle: bytes, num_bytes: int) -> CudaArea:
        driver = self._driver
        with self._current():
            address = driver.open(handle)
            with self._undone(driver.close, address):
                return self._area(address, num_bytes, b"", driver.close)

    def _area(
        self, address: int, num_bytes: int, handle: bytes, release: Callable[[int], None]
    ) -> CudaArea:
        def close() -> None:
            try:
                with self._current():
                    release(address)
            except (OSError, RuntimeError) as error:
                # A failed device: the process's end frees all its memory.
                _log.warning("device memory is not given back: %s", error)

        # torch asks the driver for the memory's device, which may be another one.
        return CudaArea(torch.as_tensor(_Foreign(address, num_bytes)), handle, close)

    @contextmanager
    def _undone(self, release: Callable[[int], None], address: int) -> Iterator[None]:
        """Release the memory if it cannot be used. Raises OSError."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            release(address)
            raise OSError(f"device memory cannot be used: {error}") from error

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Make the device's context current, which the driver's calls use: torch's first call in a
        thread does."""
        with torch.cuda.device(self._device):
            torch.cuda.mem_get_info(self._device)
            yield


def cuda_memory(device: torch.device) -> CudaMemory | None:
    """DeviceMemory of a torch CUDA device; None without NVIDIA's driver."""
    try:
        return CudaMemory(device, CudaDriver())
    except (OSError, AttributeError) as error:
        _log.warning("no memory of %s can be shared between processes: %s", device, error)
        return None


class _Foreign:
    """Device memory allocated outside torch, in the form that torch.as_tensor accepts."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }

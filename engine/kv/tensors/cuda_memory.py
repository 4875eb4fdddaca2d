"""Memory of a CUDA device that other processes of this host can map, by the driver's own calls.

Not by torch's: its handles name a place in its allocator's pools and come with files that count
their users. Here an area is one allocation, of whole pieces of GRAIN_BYTES, because smaller ones
may share a piece with others: so who has an area's handle reaches that area, and nothing else. The
calls are those of libcuda.so.1 since CUDA 11.

THIS HAS RUN ON NO GPU YET: it was written without one. Its calls are tested against a stand-in for
the driver.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

#: Of CUipcMemHandle.
HANDLE_BYTES = 64
#: The CUDA programming guide, "Interprocess Communication": only sizes of whole 2 MiB are sure to
#: be shared alone.
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
    """The driver's calls for memory, for the calling thread's current device. Raises OSError with a
    call's name and CUresult."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        self._library = ctypes.CDLL(library)
        for name, arguments in _CALLS.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int

    def allocate(self, num_bytes: int) -> int:
        """The address of new memory."""
        address = _ADDRESS()
        self._call("cuMemAlloc_v2", ctypes.byref(address), num_bytes)
        return address.value

    def free(self, address: int) -> None:
        """Nobody else may have it mapped any more."""
        self._call("cuMemFree_v2", address)

    def handle(self, address: int) -> bytes:
        """By which other processes open memory allocated here."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Where another process's memory is mapped here."""
        if len(handle) != HANDLE_BYTES:
            raise OSError(f"a handle of {len(handle)} bytes")
        address = _ADDRESS()
        copied = _Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), copied, _LAZY_PEER_ACCESS)
        return address.value

    def close(self, address: int) -> None:
        """Unmap what open has mapped."""
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
        """See DeviceArea."""
        return self._data[start : start + num_bytes]

    def close(self) -> None:
        """See DeviceArea."""
        self._data = self._data[:0]
        self._release()


class CudaMemory:
    """See kv_transfer.device_memory.DeviceMemory. Of one device, as this process numbers it."""

    def __init__(self, device: torch.device, driver: CudaDriver) -> None:
        self._device = device
        self._driver = driver

    @property
    def device_number(self) -> int:
        """See DeviceMemory."""
        index = self._device.index
        return torch.cuda.current_device() if index is None else index

    def allocate(self, num_bytes: int) -> CudaArea:
        """See DeviceMemory."""
        driver = self._driver
        with self._current():
            address = driver.allocate(-(-num_bytes // GRAIN_BYTES) * GRAIN_BYTES)
            with self._undone(driver.free, address):
                handle = driver.handle(address)
                return self._area(address, num_bytes, handle, driver.free)

    def open(self, handle: bytes, num_bytes: int) -> CudaArea:
        """See DeviceMemory."""
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
                # Of a device that has failed: all its memory goes with this process.
                _log.warning("device memory is not given back: %s", error)

        # Where the memory is, torch asks the driver: it may be another device's.
        return CudaArea(torch.as_tensor(_Foreign(address, num_bytes)), handle, close)

    @contextmanager
    def _undone(self, release: Callable[[int], None], address: int) -> Iterator[None]:
        """Releases the memory if it cannot be used. Raises OSError."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            release(address)
            raise OSError(f"device memory cannot be used: {error}") from error

    @contextmanager
    def _current(self) -> Iterator[None]:
        """The driver's calls are about the thread's current context, which torch's first call in a
        thread makes the device's."""
        with torch.cuda.device(self._device):
            torch.cuda.mem_get_info(self._device)
            yield


def cuda_memory(device: torch.device) -> CudaMemory | None:
    """Of a device that torch calls CUDA; None where NVIDIA's driver is not what drives it."""
    try:
        return CudaMemory(device, CudaDriver())
    except (OSError, AttributeError) as error:
        _log.warning("no memory of %s can be shared between processes: %s", device, error)
        return None


class _Foreign:
    """Device memory that torch has not allocated, as it takes such in."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }

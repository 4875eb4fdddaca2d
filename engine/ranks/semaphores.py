"""POSIX semaphores in shared memory. Waiting has no deadline: the starter of the ranks ends all of
them if one dies."""

from __future__ import annotations

import ctypes
import errno
import os

import torch

#: A semaphore takes 32 bytes on 64-bit Linux; each has its own cache line.
_BYTES = 64
_PAGE_BYTES = 4096

#: Calls release the GIL.
_libc = ctypes.CDLL(None, use_errno=True)


def semaphores_bytes(count: int) -> int:
    """Bytes of `count` semaphores, in whole pages."""
    return -(-count * _BYTES // _PAGE_BYTES) * _PAGE_BYTES


class Semaphore:
    """Semaphore `index` of a shared memory that begins with some. The memory must be kept alive."""

    def __init__(self, memory: torch.Tensor, index: int) -> None:
        self._address = ctypes.c_void_p(memory.data_ptr() + index * _BYTES)

    def prepare(self) -> None:
        """Set to 0, once, before any rank uses it. Raises OSError."""
        if _libc.sem_init(self._address, 1, 0):
            raise _last_error()

    def post(self) -> None:
        _libc.sem_post(self._address)

    def wait(self) -> None:
        while _libc.sem_wait(self._address):
            if ctypes.get_errno() != errno.EINTR:
                raise _last_error()


def _last_error() -> OSError:
    return OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

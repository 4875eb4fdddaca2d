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
#: Calls keep it: for those that return at once.
_quick = ctypes.PyDLL(None)
#: Tries before a wait sleeps, of some 0.5 us each: at most, and at least.
_MOST_TRIES, _FEWEST_TRIES = 256, 8


def semaphores_bytes(count: int) -> int:
    """Bytes of `count` semaphores, in whole pages."""
    return -(-count * _BYTES // _PAGE_BYTES) * _PAGE_BYTES


class Semaphore:
    """Semaphore `index` of a shared memory that begins with some. The memory must be kept alive."""

    def __init__(self, memory: torch.Tensor, index: int) -> None:
        self._address = ctypes.c_void_p(memory.data_ptr() + index * _BYTES)
        self._num_tries = _MOST_TRIES

    def prepare(self) -> None:
        """Set to 0, once, before any rank uses it. Raises OSError."""
        if _libc.sem_init(self._address, 1, 0):
            raise _last_error()

    def post(self) -> None:
        _quick.sem_post(self._address)

    def wait(self) -> None:
        """Try for some time, because to be woken takes longer than most exchanges. Tries that were
        in vain get fewer: they take a core from whoever is waited for, where cores are few."""
        for _ in range(self._num_tries):
            if not _quick.sem_trywait(self._address):
                self._num_tries = min(2 * self._num_tries, _MOST_TRIES)
                return
        self._num_tries = max(self._num_tries // 2, _FEWEST_TRIES)
        while _libc.sem_wait(self._address):
            if ctypes.get_errno() != errno.EINTR:
                raise _last_error()


def _last_error() -> OSError:
    return OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

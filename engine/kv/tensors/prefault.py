"""Backs host memory with pages in the background: touching gigabytes at the start would delay
it."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import threading
import time

import torch

_log = logging.getLogger(__name__)

#: madvise flag since Linux 5.14: backs pages as a write would, without changing them.
_MADV_POPULATE_WRITE = 23

#: Bytes per madvise call: the kernel blocks mmap and thread starts meanwhile.
_CHUNK_BYTES = 256 << 10
#: Pause between two chunks, in multiples of the first one's CPU time, to leave the CPU to others. A
#: low thread priority would not do: preempted while it holds the kernel's lock, such a thread
#: blocked others for 50 to 100 ms.
_PAUSE = 3.0
_NAME = "prefault"


def prefault(memory: torch.Tensor) -> threading.Thread | None:
    """Back all pages of `memory`, in order, in a thread that uses at most a quarter of a core.

    memory: page-aligned bytes of this process, which may be written meanwhile. Returns the thread;
    None, without effect, if the kernel does not support it.
    """
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    begin, num_bytes = memory.data_ptr(), memory.numel()

    def populate(offset: int) -> int:
        """Returns 0 or an errno."""
        size = min(_CHUNK_BYTES, num_bytes - offset)
        if madvise(begin + offset, size, _MADV_POPULATE_WRITE) == 0:
            return 0
        return ctypes.get_errno()

    def run(_kept: torch.Tensor) -> None:
        for offset in range(_CHUNK_BYTES, num_bytes, _CHUNK_BYTES):
            began_s = time.thread_time()
            if error := populate(offset):
                _log.warning("KV memory is not backed ahead: %s", os.strerror(error))
                return
            time.sleep(_PAUSE * (time.thread_time() - began_s))

    if num_bytes and (error := populate(0)):
        if error != errno.EINVAL:
            _log.warning("KV memory is not backed ahead: %s", os.strerror(error))
        return None
    thread = threading.Thread(target=run, args=(memory,), name=_NAME, daemon=True)
    thread.start()
    return thread


def wait_until_backed() -> None:
    """Return when all memory given to `prefault` in this process is backed."""
    for thread in threading.enumerate():
        if thread.name == _NAME:
            thread.join()

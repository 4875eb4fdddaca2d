"""Host memory that is backed by pages while the process already works: touching gigabytes at the
start would hold it up."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import threading
import time

import torch

_log = logging.getLogger(__name__)

#: Of madvise, from Linux 5.14 on: backs pages as a write would, and leaves what they hold.
_MADV_POPULATE_WRITE = 23

#: Asked for at a time: the kernel holds up who maps memory meanwhile, as a thread that starts does.
_CHUNK_BYTES = 256 << 10
#: Between two chunks, in times of what the first took. It leaves others the processor, as a low
#: priority would; but a thread of low priority that is put aside while it holds the kernel's lock
#: held up threads that wanted it for 50 to 100 ms.
_PAUSE = 3.0


def prefault(memory: torch.Tensor) -> threading.Thread | None:
    """Have all pages of `memory` backed, from its first on, by a thread that takes a quarter of a
    core at most.

    memory: bytes of the process's own, which begin with a page; they may be written meanwhile.
    Returns the thread, or None, with nothing done, where the kernel cannot do it.
    """
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    begin, num_bytes = memory.data_ptr(), memory.numel()

    def populate(offset: int) -> int:
        """Zero, or the number of an error."""
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
    thread = threading.Thread(target=run, args=(memory,), name="prefault", daemon=True)
    thread.start()
    return thread

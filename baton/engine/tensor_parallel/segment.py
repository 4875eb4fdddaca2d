"""Memory that the ranks of one engine share."""

from __future__ import annotations

import contextlib
import mmap
import os

import torch


class Segment:
    """Bytes behind a file descriptor that child processes inherit; zero at first, gone with the last process that maps them."""

    def __init__(self, fd: int) -> None:
        """Maps the whole of `fd`, and takes it over."""
        self.fd = fd
        memory = mmap.mmap(fd, os.fstat(fd).st_size)
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        #: [num_bytes] uint8.
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)

    @classmethod
    def create(cls, name: str, num_bytes: int) -> Segment:
        """name: for people who look at the process's maps. Raises OSError."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(fd, num_bytes)
        return cls(fd)

    def close_fd(self) -> None:
        """Once nobody is to inherit it any more; what is mapped stays."""
        os.close(self.fd)
        self.fd = -1

"""Shared memory of the ranks of one engine, as inheritable file descriptors."""

from __future__ import annotations

import contextlib
import mmap
import os

import torch


def create_segment(name: str, num_bytes: int) -> int:
    """Create a zeroed segment; it is freed with the last process that holds or maps it. Raises
    OSError.

    name: shown in the process's memory maps.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    return fd


def map_segment(fd: int) -> torch.Tensor:
    """Map the whole segment as [num_bytes] uint8. The caller keeps the descriptor and may close
    it."""
    memory = mmap.mmap(fd, os.fstat(fd).st_size)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)

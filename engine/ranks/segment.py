"""Memory that the ranks of one engine share, behind file descriptors that child processes
inherit."""

from __future__ import annotations

import contextlib
import mmap
import os

import torch


def create_segment(name: str, num_bytes: int) -> int:
    """A descriptor of zeros, gone with the last process that has or maps it. Raises OSError.

    name: for people who look at the process's maps.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    return fd


def map_segment(fd: int) -> torch.Tensor:
    """The whole segment as [num_bytes] uint8. The descriptor is still the caller's, who may close
    it."""
    memory = mmap.mmap(fd, os.fstat(fd).st_size)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)

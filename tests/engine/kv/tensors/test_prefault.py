"""Memory is backed by pages beside those who write it, and keeps what they write."""

from __future__ import annotations

import ctypes
import mmap
import os

import pytest
import torch

from baton_kernels.cpu.memory import host_memory
from engine.kv.tensors.prefault import prefault

_PAGE = mmap.PAGESIZE


def num_backed(memory: torch.Tensor) -> int:
    """Pages of it that are there, by mincore."""
    num_pages = -(-memory.numel() // _PAGE)
    found = (ctypes.c_ubyte * num_pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    address, size = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.numel())
    if libc.mincore(address, size, found):
        pytest.skip(f"mincore: {os.strerror(ctypes.get_errno())}")
    return sum(page & 1 for page in found)


@pytest.mark.parametrize("num_bytes", [1, _PAGE + 1, 9 << 20])
def test_every_page_is_backed_and_what_was_written_stays(num_bytes: int) -> None:
    memory = host_memory(num_bytes)
    memory[-1] = 7
    memory[-1] = 7
    thread = prefault(memory)
    if thread is None:
        pytest.skip("this kernel cannot")
    memory[0] = 3
    thread.join()
    assert num_backed(memory) == -(-num_bytes // _PAGE)
    assert memory[0] == 3
    assert num_bytes == 1 or memory[-1] == 7
    assert memory[1:-1].count_nonzero() == 0


def test_nothing_to_back_is_no_fault() -> None:
    assert prefault(host_memory(0)) is not None

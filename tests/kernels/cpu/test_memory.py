"""Memory for packed weights: aligned, of its own, and alive as long as something lies in it."""

from __future__ import annotations

import gc

import pytest
import torch

from baton_kernels.cpu.memory import Arena, host_memory

_PAGE, _LINE = 2 << 20, 64


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, _PAGE, 3 * _PAGE + 5])
def test_fresh_memory_is_zero_and_begins_with_a_huge_page(num_bytes: int) -> None:
    memory = host_memory(num_bytes)
    assert memory.shape == (num_bytes,)
    assert memory.dtype == torch.uint8
    assert not memory.any()
    assert memory.data_ptr() % _PAGE == 0


def test_things_of_an_arena_lie_apart_in_whole_lines() -> None:
    sizes = [1, 64, 0, 65, 9 << 20, 9 << 20, 40 << 20, 7]
    arena = Arena()
    parts = [arena.take(size) for size in sizes]
    for value, part in enumerate(parts):
        part.fill_(value)
    for value, (size, part) in enumerate(zip(sizes, parts, strict=True)):
        assert part.shape == (size,)
        assert part.data_ptr() % _LINE == 0
        assert (part == value).all()


@pytest.mark.slow
def test_a_thing_outlives_its_arena() -> None:
    arena = Arena()
    arena.take(100)
    part = arena.take(1000).fill_(3)
    del arena
    gc.collect()
    torch.full((1 << 20,), 5)
    assert (part == 3).all()

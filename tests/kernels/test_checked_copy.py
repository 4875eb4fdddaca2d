"""Blocks copied and hashed in one pass: the bytes of a plain copy, and the checksum that the xxhash
library computes."""

from __future__ import annotations

import math

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_kernels.cpu.checked_copy import checked_copy_of
from baton_kernels.cpu.library import library

NUM_BLOCKS = 9

pytestmark = pytest.mark.skipif(library() is None, reason="no native CPU kernels here")
quick = settings(deadline=None, database=None, max_examples=60)


def pool_of(num_layers: int, num_heads: int, head_bytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(head_bytes)
    shape = (NUM_BLOCKS, num_layers, 2, num_heads, head_bytes)
    # A row more, so that the blocks can begin where a stripe does.
    memory = torch.randint(0, 256, (math.prod(shape) + 64,), generator=generator).to(torch.uint8)
    return memory[-memory.data_ptr() % 64 :][: math.prod(shape)].view(shape)


def zeros_like(pool: torch.Tensor) -> torch.Tensor:
    memory = torch.zeros(pool.numel() + 64, dtype=torch.uint8)
    return memory[-memory.data_ptr() % 64 :][: pool.numel()].view(pool.shape)


def rows_of(
    pool: torch.Tensor, block_size: int, ids: list[int], tokens: tuple[int, int], layers: slice
) -> list[torch.Tensor]:
    """The range's part of each block: [layers, 2, heads, tokens, row_bytes], views."""
    first, count = tokens
    blocks = pool.unflatten(-1, (block_size, -1))
    bounds = [
        (max(first, at), min(first + count, at + block_size))
        for at in range(0, len(ids) * block_size, block_size)
    ]
    return [
        blocks[block_id, layers, :, :, begin - i * block_size : end - i * block_size]
        for i, (block_id, (begin, end)) in enumerate(zip(ids, bounds, strict=True))
    ]


@pytest.mark.slow
@quick
@given(st.data())
def test_one_pass_copies_and_hashes_as_two_do(data):
    num_layers, block_size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    row_bytes = 64 * data.draw(st.integers(1, 5))
    pool = pool_of(num_layers, data.draw(st.integers(1, 3)), block_size * row_bytes)
    first = data.draw(st.integers(0, num_layers - 1))
    layers = first, data.draw(st.integers(1, num_layers - first))
    ids = data.draw(st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, unique=True))
    skipped = data.draw(st.integers(0, block_size - 1))
    rest = len(ids) * block_size - skipped
    # All blocks that are named are in the range.
    tokens = skipped, data.draw(st.integers(max(1, rest - block_size + 1), rest))
    seed = data.draw(st.integers(0, 2**64 - 1))
    copy = checked_copy_of(pool, row_bytes, block_size)
    assert copy is not None
    assert copy.copies_rows
    part = slice(first, sum(layers))
    expected = b"".join(
        rows.numpy().tobytes() for rows in rows_of(pool, block_size, ids, tokens, part)
    )
    if len(expected) < copy.min_bytes:
        return
    packed = bytearray(len(expected))
    checksum = copy.gather(ids, tokens, layers, memoryview(packed), seed)
    assert packed == expected
    assert checksum == xxhash.xxh3_64_intdigest(expected, seed)

    target, wanted = zeros_like(pool), zeros_like(pool)
    back = checked_copy_of(target, row_bytes, block_size)
    assert back is not None
    assert back.scatter(ids, tokens, layers, memoryview(packed), seed) == checksum
    sources = rows_of(pool, block_size, ids, tokens, part)
    for rows, source in zip(rows_of(wanted, block_size, ids, tokens, part), sources, strict=True):
        rows.copy_(source)
    assert torch.equal(target, wanted)


def test_whole_blocks_may_have_more_than_rows():
    # Two rows of 60 bytes and a scale for each.
    pool = pool_of(2, 1, 128)
    copy = checked_copy_of(pool, 60, 2)
    assert copy is not None
    assert not copy.copies_rows
    packed = bytearray(2 * 2 * 128 * 2)
    checksum = copy.gather((4, 1), (0, 4), (0, 2), memoryview(packed), 3)
    assert packed == pool[[4, 1]].numpy().tobytes()
    assert checksum == xxhash.xxh3_64_intdigest(packed, 3)


def test_short_payloads_are_for_others():
    copy = checked_copy_of(pool_of(1, 1, 64), 64, 1)
    assert copy is not None
    assert 240 < copy.min_bytes <= 256


def test_layers_of_another_size_are_for_others():
    assert checked_copy_of(torch.zeros(2, 2, 2, 1, 48, dtype=torch.uint8), 48, 1) is None


def test_a_payload_of_another_size_is_refused():
    copy = checked_copy_of(pool_of(2, 1, 256), 64, 4)
    assert copy is not None
    with pytest.raises(ValueError, match="bytes for"):
        copy.gather((0, 1), (0, 8), (0, 2), memoryview(bytearray(1000)), 0)

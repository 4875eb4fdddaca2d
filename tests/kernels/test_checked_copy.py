"""Blocks copied and hashed in one pass: the bytes of a plain copy, and the checksum that the xxhash
library computes."""

from __future__ import annotations

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


def pool_of(num_layers: int, layer_bytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(layer_bytes)
    # A row more, so that the blocks can begin where a stripe does.
    memory = torch.randint(
        0, 256, (NUM_BLOCKS * num_layers * layer_bytes + 64,), generator=generator
    ).to(torch.uint8)
    memory = memory[-memory.data_ptr() % 64 :][: NUM_BLOCKS * num_layers * layer_bytes]
    return memory.view(NUM_BLOCKS, num_layers, layer_bytes)


@quick
@given(st.data())
def test_one_pass_copies_and_hashes_as_two_do(data):
    num_layers = data.draw(st.integers(1, 4))
    pool = pool_of(num_layers, 64 * data.draw(st.integers(1, 40)))
    first = data.draw(st.integers(0, num_layers - 1))
    count = data.draw(st.integers(1, num_layers - first))
    ids = data.draw(st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, unique=True))
    seed = data.draw(st.integers(0, 2**64 - 1))
    copy = checked_copy_of(pool)
    assert copy is not None
    if not copy.fits(len(ids), count):
        return
    expected = pool[ids, first : first + count].numpy().tobytes()
    packed = bytearray(len(expected))
    checksum = copy.gather(ids, first, count, memoryview(packed), seed)
    assert packed == expected
    assert checksum == xxhash.xxh3_64_intdigest(expected, seed)

    target = pool.clone().zero_()
    back = checked_copy_of(target)
    if back is None:
        return  # This copy of the tensor does not begin where a stripe does.
    assert back.scatter(ids, first, count, memoryview(packed), seed) == checksum
    wanted = torch.zeros_like(pool)
    wanted[ids, first : first + count] = pool[ids, first : first + count]
    assert torch.equal(target, wanted)


def test_short_payloads_are_for_others():
    copy = checked_copy_of(pool_of(1, 64))
    assert copy is not None
    assert not copy.fits(3, 1)
    assert copy.fits(4, 1)


def test_layers_of_another_size_are_for_others():
    assert checked_copy_of(torch.zeros(2, 2, 96, dtype=torch.uint8)) is None


def test_a_payload_of_another_size_is_refused():
    copy = checked_copy_of(pool_of(2, 256))
    assert copy is not None
    with pytest.raises(ValueError, match="bytes for"):
        copy.gather((0, 1), 0, 2, memoryview(bytearray(1000)), 0)

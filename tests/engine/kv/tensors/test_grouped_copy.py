"""The device copies of a pool with slots pack and unpack what the host's codec does."""

from __future__ import annotations

import pytest
import torch

from baton.types import KvLayout
from baton_kernels.word_sum import host_checksum
from engine.kv.groups.full import FULL
from engine.kv.groups.window import WINDOWED
from engine.kv.range import KvRange
from engine.kv.tensors.copy_order import HostOrder
from engine.kv.tensors.device_copy import PagedDeviceCopy
from engine.kv.tensors.grouped_copy import GroupedDeviceCopy, grouped_copy
from engine.kv.tensors.paged import GroupedTensorPool, TorchKvPool, host_pool
from kv_transfer.codec import ChunkCodec
from kv_transfer.wire_format import wire_format
from tests.support.device_double import DoubleMemory

BLOCKS = (4, 0, 2, 5)


def pool_of(dtype: str, seed: int) -> tuple[GroupedTensorPool, GroupedDeviceCopy]:
    """Random bytes, slots for the last three of BLOCKS, and what copies them on a device."""
    layout = KvLayout(*("m", 3, 2, 8, dtype, 4), window=9, windowed_layers=(0, 2))
    pool = GroupedTensorPool(layout, 8, 5, host_pool)
    for slot, block_id in enumerate(reversed(BLOCKS[1:])):
        pool.slot_tables[WINDOWED].of_block[block_id] = slot
    copies = {}
    for number, own in pool.pools.items():
        assert isinstance(own, TorchKvPool)
        generator = torch.Generator().manual_seed(seed)
        own._blocks.copy_(torch.randint(0, 256, own._blocks.shape, generator=generator))
        copies[number] = PagedDeviceCopy(own.layout, own._blocks, HostOrder(), DoubleMemory())
    found = grouped_copy(copies, pool.ids_in, layout.block_size)
    assert found
    return pool, found


@pytest.mark.parametrize("group", [FULL, WINDOWED])
@pytest.mark.parametrize(("dtype", "wire_dtype"), [("float32",) * 2, ("int8", "int8")])
@pytest.mark.parametrize("wire_block_size", [4, 8])
def test_payloads_are_those_of_the_host(group, dtype, wire_dtype, wire_block_size):
    source, copy = pool_of(dtype, 1)
    target, back = pool_of(dtype, 2)
    other, _ = pool_of(dtype, 2)
    layout = KvLayout("m", 3, 2, 8, dtype, wire_block_size)
    wire = wire_format(wire_dtype, layout)
    piece = KvRange(4, 12, 0, source.groups.num_layers(group), group)
    assert copy.fits(piece, wire) == (dtype == "float32" or wire_block_size == 4)
    if not copy.fits(piece, wire):
        return
    wanted = memoryview(bytearray(wire.num_bytes(piece)))
    ChunkCodec(source, wire).pack(BLOCKS, piece, wanted)
    payload = torch.zeros(wanted.nbytes, dtype=torch.uint8)
    assert copy.pack(BLOCKS, piece, wire, payload, 7) == host_checksum(payload, 7)
    assert payload.numpy().tobytes() == wanted
    passed = memoryview(bytearray(wanted.nbytes))
    copy.pack_to_host(BLOCKS, piece, wire, passed)
    assert passed == wanted
    ChunkCodec(other, wire).unpack(BLOCKS, piece, wanted)
    back.unpack(BLOCKS, piece, wire, payload, 7)
    for own, expected in zip(target.pools.values(), other.pools.values(), strict=True):
        assert torch.equal(own._blocks, expected._blocks)
    back.unpack_from_host(BLOCKS, piece, wire, wanted)
    for own, expected in zip(target.pools.values(), other.pools.values(), strict=True):
        assert torch.equal(own._blocks, expected._blocks)


def test_what_lies_in_no_one_memory_is_left_to_the_host():
    source, copy = pool_of("float32", 1)
    wire = wire_format("float32", source.layout)
    assert not copy.fits(KvRange(4, 12, 0, 3), wire)
    piece = KvRange(0, 4, 0, 2, WINDOWED)
    with pytest.raises(ValueError, match="no slot"):
        copy.pack(BLOCKS, piece, wire, torch.zeros(wire.num_bytes(piece), dtype=torch.uint8), 0)
    assert grouped_copy({FULL: None}, source.ids_in, 4) is None

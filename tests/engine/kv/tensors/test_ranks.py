"""A pool with heads spread over ranks packs and unpacks the same bytes as a whole one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.types import KvLayout
from engine.kv.range import KvRange
from engine.kv.tensors.paged import TorchKvPool
from engine.kv.tensors.ranks import PoolSize, ShardedKvPool, pool_sizes
from engine.ranks.mesh import Degrees, stage_layers
from engine.ranks.parts import rank_parts
from engine.shard import Shard

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, NUM_BLOCKS = 3, 4, 2, 5


def layout_of(block_size: int, dtype: str) -> KvLayout:
    return KvLayout("f", NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, dtype, block_size)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def sharded(layout: KvLayout, degrees: Degrees) -> tuple[ShardedKvPool, PoolSize, torch.Tensor]:
    (size,) = pool_sizes(layout, NUM_BLOCKS, 0, rank_parts(layout, degrees))
    memory = torch.zeros(sum(size.rank_bytes), dtype=torch.uint8)
    return ShardedKvPool(memory, size, layout), size, memory


@settings(deadline=None)
@given(data=st.data())
def test_bytes_are_those_of_one_pool(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(["float32", "bfloat16", "float16", "int8", "fp8"]))
    block_size = data.draw(st.sampled_from([2, 4, 6]))
    degrees = Degrees(
        data.draw(st.sampled_from([1, 2, 4, 8])), data.draw(st.integers(1, NUM_LAYERS))
    )
    table = data.draw(st.permutations(range(NUM_BLOCKS)))[: data.draw(st.integers(1, NUM_BLOCKS))]
    num_tokens = data.draw(st.integers(1, len(table) * block_size))
    first = data.draw(st.integers(0, num_tokens - 1))
    first_layer = data.draw(st.integers(0, NUM_LAYERS - 1))
    piece = KvRange(first, num_tokens - first, first_layer, NUM_LAYERS - first_layer)
    layout = layout_of(block_size, dtype)
    whole = TorchKvPool(layout, NUM_BLOCKS, torch.device("cpu"))
    parts, size, memory = sharded(layout, degrees)

    num_bytes = piece.num_bytes(layout.token_layer_bytes)
    wire = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8).numpy().data
    whole.unpack(table, piece, wire)
    parts.unpack(table, piece, wire)
    for rank in range(degrees.num_ranks):
        place = degrees.place(rank)
        heads = Shard(place.tensor_rank, degrees.tensor).kv_heads(NUM_KV_HEADS)
        layers = stage_layers(NUM_LAYERS, degrees.pipeline)[place.stage]
        own = size.pool_of(memory, rank)
        for mine, wanted in ((own.tensor, whole.tensor), (own.scales, whole.scales)):
            if mine is not None and wanted is not None:
                there = wanted[:, layers.start : layers.stop, :, heads.start : heads.stop]
                assert torch.equal(bits(mine), bits(there))

    num_copied = data.draw(st.integers(1, NUM_BLOCKS // 2))
    blocks = data.draw(st.permutations(range(NUM_BLOCKS)))
    for pool in (whole, parts):
        pool.copy_blocks(blocks[:num_copied], blocks[-num_copied:])
    everything = KvRange(0, NUM_BLOCKS * block_size, 0, NUM_LAYERS)
    packed = [bytearray(NUM_BLOCKS * layout.block_bytes) for _ in range(2)]
    whole.pack(range(NUM_BLOCKS), everything, memoryview(packed[0]))
    parts.pack(range(NUM_BLOCKS), everything, memoryview(packed[1]))
    assert packed[0] == packed[1]


def test_wrong_ranges_and_read_only_memory_are_refused() -> None:
    pool, _, memory = sharded(layout_of(4, "float32"), Degrees(2))
    piece = KvRange(0, 4, 0, NUM_LAYERS)
    size = piece.num_bytes(pool.layout.token_layer_bytes)
    for block_ids, num_bytes in (((NUM_BLOCKS,), size), ((0,), size + 4), ((), size)):
        data = memoryview(bytearray(b"\1" * num_bytes))
        with pytest.raises(ValueError, match=r"\w"):
            pool.unpack(block_ids, piece, data)
        with pytest.raises(ValueError, match=r"\w"):
            pool.pack(block_ids, piece, data)
    with pytest.raises(ValueError, match="read-only"):
        pool.pack((0,), piece, memoryview(bytes(size)))
    assert not memory.any()

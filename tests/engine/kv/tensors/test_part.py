"""A part of a pool is the pool with fewer layers and heads."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.types import KvLayout
from engine.kv.groups.group import SlotTable
from engine.kv.groups.state import STATE
from engine.kv.groups.window import WINDOWED
from engine.kv.interface import KvPool
from engine.kv.part import KvPart
from engine.kv.range import ALL, KvRange
from engine.kv.tensors.array import ArrayKvPool
from engine.kv.tensors.grouped import GroupedKvPool
from engine.kv.tensors.paged import TorchKvPool, host_pool
from engine.kv.tensors.part import pool_part
from engine.kv.tensors.ranks import ShardedKvPool, own_kv_pool, pool_sizes
from engine.ranks.mesh import Degrees
from engine.ranks.parts import rank_parts

NUM_BLOCKS, NUM_LAYERS, NUM_HEADS = 5, 4, 4


def layout_of(dtype: str = "int64", **changes: Any) -> KvLayout:
    return KvLayout("m", NUM_LAYERS, NUM_HEADS, 4, dtype, 4, **changes)


def grouped(layout: KvLayout, num_blocks: int) -> GroupedKvPool[TorchKvPool]:
    pool = GroupedKvPool(layout, num_blocks, num_blocks, host_pool)
    for block_id in range(num_blocks):
        pool.slot_tables[WINDOWED].of_block[block_id] = num_blocks - 1 - block_id
    return pool


def sharded(layout: KvLayout, num_blocks: int) -> ShardedKvPool:
    (size,) = pool_sizes(layout, num_blocks, 0, rank_parts(layout, Degrees(2, 2)))
    memory = torch.zeros(sum(size.rank_bytes), dtype=torch.uint8)
    return ShardedKvPool(memory, size, layout)


WINDOWED_LAYERS: dict[str, Any] = {"window": 6, "windowed_layers": (0, 2)}
POOLS = {
    "array": (ArrayKvPool, layout_of()),
    "array, windows": (ArrayKvPool, layout_of(**WINDOWED_LAYERS)),
    "torch": (host_pool, layout_of("bfloat16")),
    "torch, scales": (host_pool, layout_of("fp8")),
    "grouped": (grouped, layout_of("float32", **WINDOWED_LAYERS)),
    "sharded": (sharded, layout_of("int8")),
}


def everything(layout: KvLayout) -> KvRange:
    return KvRange(0, NUM_BLOCKS * layout.block_size, 0, layout.num_layers)


def packed(pool: KvPool, block_ids: list[int], piece: KvRange) -> np.ndarray:
    """[layers, parts, heads, bytes of a head]."""
    data = bytearray(pool.groups.num_bytes(piece))
    pool.pack(block_ids, piece, memoryview(data))
    heads = (piece.num_layers, pool.layout.num_parts, pool.layout.num_kv_heads)
    return np.frombuffer(data, dtype=np.uint8).reshape(*heads, -1)


@settings(deadline=None)
@given(
    st.sampled_from(sorted(POOLS)),
    st.tuples(st.integers(0, 3), st.integers(1, 4)),
    st.tuples(st.integers(0, 3), st.integers(1, 4)),
    st.tuples(st.integers(0, 19), st.integers(1, 20)),
    st.permutations(range(NUM_BLOCKS)),
)
def test_a_part_has_its_layers_and_heads_of_the_whole(
    name: str,
    layers: tuple[int, int],
    heads: tuple[int, int],
    tokens: tuple[int, int],
    table: list[int],
) -> None:
    make, layout = POOLS[name]
    part = KvPart(
        *(layers[0], min(layers[1], NUM_LAYERS - layers[0])),
        *(heads[0], min(heads[1], NUM_HEADS - heads[0])),
    )
    whole, other = make(layout, NUM_BLOCKS), make(layout, NUM_BLOCKS)
    num_bytes = NUM_BLOCKS * layout.block_bytes
    numbers = np.random.default_rng(1).integers(1, 256, num_bytes, dtype=np.uint8)
    whole.unpack(range(NUM_BLOCKS), everything(layout), numbers.data)
    ours, theirs = pool_part(whole, part), pool_part(other, part)
    assert ours.layout == part.layout(layout)
    first, num_tokens = tokens[0], min(tokens[1], 20 - tokens[0])
    wanted = packed(whole, table, KvRange(first, num_tokens, part.first_layer, part.num_layers))
    wanted = wanted[:, :, part.heads.start : part.heads.stop]
    got = packed(ours, table, KvRange(first, num_tokens, 0, part.num_layers))
    assert (got == wanted).all()
    piece = KvRange(first, num_tokens, 0, part.num_layers)
    theirs.unpack(table, piece, memoryview(bytearray(got.tobytes())))
    assert (packed(theirs, table, piece) == wanted).all()
    written = packed(other, table, everything(layout))
    assert np.count_nonzero(written) == np.count_nonzero(wanted), "written beside it"
    for group in ours.groups.paged:
        of_group = KvRange(first, num_tokens, 0, group.num_layers, group.number)
        rows = packed(ours, table, of_group)
        assert (rows == wanted[list(group.layers)]).all()


@pytest.mark.parametrize("name", ["array", "torch", "grouped"])
def test_layers_with_all_their_heads_are_lent_as_they_lie(name: str) -> None:
    make, layout = POOLS[name]
    whole = make(layout, NUM_BLOCKS)
    data = np.random.default_rng(1).integers(1, 99, NUM_BLOCKS * layout.block_bytes, dtype=np.uint8)
    whole.unpack(range(NUM_BLOCKS), everything(layout), data.data)
    stage = pool_part(whole, KvPart(1, 3, 0, NUM_HEADS))
    numbers = [ALL] if name != "grouped" else [group.number for group in stage.groups.paged]
    assert (stage.memory_of(ALL) is None) is (name == "grouped")
    for number in numbers:
        memory = stage.memory_of(number)
        assert memory is not None
        assert memory.has_block_views
        num_layers = stage.groups.num_layers(number)
        piece = KvRange(2 * 4, 4, 0, num_layers, number)
        (block_id,) = stage.ids_in(number, [3])
        view = memory.block_view(block_id, 0, num_layers)
        wanted = packed(stage, [0, 1, 3], piece).tobytes()
        assert bytes(view) == wanted
        if copy := memory.checked_copy:
            out = bytearray(len(wanted))
            copy.gather([block_id], (0, 4), (0, num_layers), memoryview(out), 5)
            assert out == wanted


def test_some_heads_are_not_lent() -> None:
    memory = pool_part(ArrayKvPool(layout_of(), 2), KvPart(0, NUM_LAYERS, 1, 2)).memory_of(ALL)
    assert memory is not None
    assert not memory.has_block_views


def test_the_whole_is_the_pool_itself() -> None:
    pool = ArrayKvPool(layout_of(), 2)
    assert pool_part(pool, KvPart.whole(pool.layout)) is pool


@pytest.mark.parametrize(
    "part", [KvPart(3, 2, 0, 1), KvPart(0, 1, 0, 5), KvPart(0, 0, 0, 1), KvPart(-1, 2, 0, 1)]
)
def test_what_a_pool_does_not_hold_is_refused(part: KvPart) -> None:
    with pytest.raises(ValueError, match="not within"):
        pool_part(ArrayKvPool(layout_of(), 2), part)


def test_a_part_has_some_of_the_layers_with_a_state() -> None:
    pool = ArrayKvPool(layout_of(num_state_layers=3, state_layer_bytes=8), 2, 1)
    pool.slot_tables[STATE].of_block[1] = 0
    pool.unpack([1], KvRange(4, 1, 0, 3, STATE), memoryview(bytes(range(24))))
    part, without = (pool_part(pool, KvPart(0, 1, 0, 1, *own)) for own in ((1, 2), (0, 0)))
    assert without.layout.num_state_layers == 0
    assert STATE not in without.slot_tables
    out = bytearray(16)
    part.pack([1], KvRange(4, 1, 0, 2, STATE), memoryview(out))
    assert out == bytes(range(8, 24))
    part.unpack([1], KvRange(4, 1, 1, 1, STATE), memoryview(b"x" * 8))
    pool.pack([1], KvRange(4, 1, 1, 2, STATE), memoryview(out))
    assert out == bytes(range(8, 16)) + b"x" * 8
    with pytest.raises(ValueError, match="is no state of 3 layers"):
        part.pack([1], KvRange(4, 1, 1, 2, STATE), memoryview(out))


def test_ranges_are_those_of_the_part() -> None:
    part = pool_part(ArrayKvPool(layout_of(), 2), KvPart(1, 2, 0, 1))
    for piece in (KvRange(0, 4, 1, 2), KvRange(0, 4, -1, 1), KvRange(0, 9, 0, 1)):
        with pytest.raises(ValueError, match=r"\w"):
            part.pack([0, 1], piece, memoryview(bytearray(part.groups.num_bytes(piece))))


@pytest.mark.parametrize("degrees", [Degrees(2), Degrees(1, 2), Degrees(2, 4)])
@pytest.mark.parametrize("windows", [(), (0, 2), (2, 3)])
def test_a_ranks_own_pools_are_a_pool_of_its_part(
    degrees: Degrees, windows: tuple[int, ...]
) -> None:
    """Also where a stage has layers with a window alone, which lie in slots, or none of them."""
    layout = layout_of("float32", window=6 if windows else 0, windowed_layers=windows)
    sizes = pool_sizes(
        layout, NUM_BLOCKS, NUM_BLOCKS if windows else 0, rank_parts(layout, degrees)
    )
    memories = [torch.zeros(sum(size.rank_bytes), dtype=torch.uint8) for size in sizes]
    pools = iter(
        [
            ShardedKvPool(memory, size, size.layout)
            for memory, size in zip(memories, sizes, strict=True)
        ]
    )
    table = SlotTable(NUM_BLOCKS, array("q", [3, 0, 4, 1, 2]))
    whole: Any = next(pools)
    if windows:
        given = iter((whole, *pools))
        whole = GroupedKvPool(layout, NUM_BLOCKS, NUM_BLOCKS, lambda *_: next(given), table)
    data = np.random.default_rng(1).integers(1, 99, NUM_BLOCKS * layout.block_bytes, dtype=np.uint8)
    whole.unpack(range(NUM_BLOCKS), everything(layout), data.data)
    for rank, part in enumerate(rank_parts(layout, degrees)):
        own_pools = [
            size.pool_of(memory, rank) for memory, size in zip(memories, sizes, strict=True)
        ]
        own = own_kv_pool(part, layout, own_pools, table)
        assert own.layout == part.layout(layout)
        blocks = [4, 0, 2]
        piece = KvRange(1, 10, 0, part.num_layers)
        assert (packed(own, blocks, piece) == packed(pool_part(whole, part), blocks, piece)).all()

"""A pool with slots for windowed layers holds what one pool holds, for the blocks that have a slot,
and takes less memory: several times as many sequences of a long context fit."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.types import KvLayout
from engine.kv.groups.group import SlotTable
from engine.kv.groups.window import WINDOWED, WindowSlots
from engine.kv.layout import groups_of
from engine.kv.range import KvRange
from engine.kv.tensors.paged import GroupedTensorPool, TorchKvPool, host_pool
from engine.memory_plan import MemoryPlan, plan_blocks
from engine.ranks.mesh import Degrees

CPU, NUM_BLOCKS, NUM_LAYERS, BLOCK = torch.device("cpu"), 6, 5, 4
#: As Gemma 3 has them: five of six layers.
GEMMA = KvLayout(
    *("", 30, 4, 256, "bfloat16", 16),
    window=1024,
    windowed_layers=tuple(layer for layer in range(30) if layer % 6 != 5),
)
GIB = 2**30


def layout_of(windowed: tuple[int, ...], dtype: str) -> KvLayout:
    return KvLayout(
        *("f", NUM_LAYERS, 2, 4, dtype, BLOCK), window=BLOCK + 1, windowed_layers=windowed
    )


def read(kv: TorchKvPool | GroupedTensorPool, table: list[int], piece: KvRange) -> bytes:
    data = bytearray(piece.num_bytes(kv.layout.token_layer_bytes))
    kv.pack(table, piece, memoryview(data))
    return bytes(data)


@settings(deadline=None)
@given(
    windowed=st.sets(st.integers(0, NUM_LAYERS - 1), min_size=1, max_size=NUM_LAYERS - 1),
    dtype=st.sampled_from(["float32", "bfloat16", "int8"]),
    table=st.permutations(range(NUM_BLOCKS)),
    data=st.data(),
)
def test_it_holds_what_one_pool_holds(
    windowed: set[int], dtype: str, table: list[int], data: st.DataObject
) -> None:
    layout = layout_of(tuple(sorted(windowed)), dtype)
    whole, grouped = (
        TorchKvPool(layout, NUM_BLOCKS, CPU),
        GroupedTensorPool(layout, NUM_BLOCKS, 4, host_pool),
    )
    slots, own = WindowSlots(SlotTable(4, grouped.slot_tables[WINDOWED].of_block)), table[:3]
    for block_id in data.draw(st.permutations(own)):
        slots.take(block_id)
    first, layer = data.draw(st.integers(0, 11)), data.draw(st.integers(0, NUM_LAYERS - 1))
    piece = KvRange(
        *(first, data.draw(st.integers(1, 12 - first))),
        *(layer, data.draw(st.integers(1, NUM_LAYERS - layer))),
    )
    size = piece.num_bytes(layout.token_layer_bytes)
    sent = data.draw(st.binary(min_size=size, max_size=size))
    for pool in (whole, grouped):
        pool.unpack(own, piece, memoryview(sent))
        assert read(pool, own, piece) == sent
    everything = KvRange(0, 12, 0, NUM_LAYERS)
    assert read(grouped, own, everything) == read(whole, own, everything)
    # A copy has the KV of all layers; where the source has no slot, of the full ones.
    source, target = own[0], table[3]
    slots.take(target)
    for pool in (whole, grouped):
        pool.copy_blocks([source], [target])
    block = KvRange(0, BLOCK, 0, NUM_LAYERS)
    assert read(grouped, [target], block) == read(whole, [target], block)
    for number, is_windowed in enumerate(layer in windowed for layer in range(NUM_LAYERS)):
        one = replace(block, first_layer=number, num_layers=1)
        if is_windowed:
            with pytest.raises(ValueError, match="no slot"):
                read(grouped, [table[4]], one)
        else:
            assert read(grouped, [table[4]], one) == read(whole, [table[4]], one)


def test_a_window_table_names_the_slots_of_what_new_tokens_attend_to() -> None:
    kv = GroupedTensorPool(layout_of((0, 2), "float32"), NUM_BLOCKS, 4, host_pool)
    slots = WindowSlots(SlotTable(4, kv.slot_tables[WINDOWED].of_block))
    for block_id in (5, 1):
        slots.take(block_id)
    # Tokens 10 and 11 attend to tokens from 6 on: blocks at places 1 and 2.
    table = array("q", [3, 5, 1, 0])
    assert list(kv.slot_table(table, 10, 12))[1:] == [0, 1]
    assert min(kv.slot_table(table, 10, 13)) < 0, "the block of token 12 has no slot"


def plan(max_window_slots: int, kv_bytes: int | None = None, num_seqs: int = 64) -> MemoryPlan:
    return plan_blocks(
        GEMMA,
        dtype="bfloat16",
        weights=GIB,
        activations=GIB,
        graphs=0,
        max_model_len=32768,
        max_num_seqs=num_seqs,
        available_bytes=2000 * GIB,
        degrees=Degrees(),
        kv_cache_memory_bytes=kv_bytes,
        num_blocks=None,
        max_window_slots=max_window_slots,
    )


def test_the_same_memory_holds_several_times_as_many_long_sequences() -> None:
    slots, budget = groups_of(GEMMA).max_slots(64, 2048), 32 * GIB
    assert slots == 64 * (64 + 2) + 256
    whole, apart = plan(0, budget), plan(slots, budget)
    assert (whole.num_window_slots, apart.num_window_slots) == (0, slots)
    assert whole.num_longest_seqs == 8
    assert apart.num_longest_seqs == 40
    assert whole.kv_bytes <= budget
    assert budget - apart.block_bytes < apart.kv_bytes <= budget
    # Bytes of one sequence of 32768 tokens: 30 layers of all tokens, or 5 of all and 25 of a window
    # of 64 blocks and the two that it may begin and end in.
    token_layer = GEMMA.token_layer_bytes
    assert whole.block_bytes * 2048 == 32768 * 30 * token_layer
    assert apart.block_bytes * 2048 == 32768 * 5 * token_layer
    assert apart.slot_bytes * 66 == 66 * 16 * 25 * token_layer
    ((_, row),) = [found for found in apart.rows() if found[0] == "KV cache"]
    assert f"{slots} window slots" in row


def test_enough_for_all_sequences_is_all_that_is_taken() -> None:
    slots = groups_of(GEMMA).max_slots(64, 2048)
    whole, apart = plan(0), plan(slots)
    assert whole.num_blocks == apart.num_blocks == 64 * 2048
    assert apart.kv_bytes < whole.kv_bytes / 4


@pytest.mark.parametrize("kv_bytes", [GIB // 64, GIB, 3 * GIB, 8 * GIB])
def test_there_are_never_fewer_blocks_than_in_one_pool(kv_bytes: int) -> None:
    slots = groups_of(GEMMA).max_slots(64, 2048)
    whole, apart = plan(0, kv_bytes), plan(slots, kv_bytes)
    assert apart.num_blocks >= whole.num_blocks
    if apart.num_window_slots:
        assert apart.num_blocks > slots, "a block more than can be in windows"
    else:
        assert apart == whole


@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 0)])
def test_a_copy_with_one_slot_changes_no_slot(source: int, target: int) -> None:
    grouped = GroupedTensorPool(layout_of((0, 1), "float32"), NUM_BLOCKS, 4, host_pool)
    slot_of = grouped.slot_tables[WINDOWED].of_block
    slot_of[0], slot_of[2] = 0, 3
    piece = KvRange(0, BLOCK, 0, 2, WINDOWED)
    num_bytes = piece.num_bytes(grouped.layout.token_layer_bytes)
    for block_id, byte in ((0, b"\1"), (2, b"\2")):
        grouped.unpack([block_id], piece, memoryview(byte * num_bytes))
    grouped.copy_blocks([source], [target])
    for block_id, byte in ((0, b"\1"), (2, b"\2")):
        held = bytearray(num_bytes)
        grouped.pack([block_id], piece, memoryview(held))
        assert held == byte * num_bytes

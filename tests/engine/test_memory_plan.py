"""The memory plan leaves room for KV on its way."""

from __future__ import annotations

from dataclasses import replace

from baton.kv_transports import (
    DEVICE_MAX_CHUNK_BYTES,
    DEVICE_NUM_CREDITS,
    PLANNED_CONNECTIONS,
    planned_device_bytes,
)
from baton.types import KvLayout
from engine.memory_plan import MemoryPlan, plan_blocks
from engine.ranks.mesh import Degrees

LAYOUT = KvLayout("", 2, 2, 64, "bfloat16", 16)
MIB = 1 << 20


def plan(transfers: int, layout: KvLayout = LAYOUT) -> MemoryPlan:
    return plan_blocks(
        layout,
        dtype="bfloat16",
        weights=64 * MIB,
        activations=MIB,
        graphs=0,
        max_model_len=4096,
        max_num_seqs=4096,
        available_bytes=1024 * MIB,
        degrees=Degrees(),
        kv_cache_memory_bytes=None,
        num_blocks=None,
        transfers=transfers,
    )


def test_what_is_on_its_way_is_no_room_for_blocks() -> None:
    without, with_them = plan(0), plan(planned_device_bytes())
    assert without.kv_bytes - with_them.kv_bytes == planned_device_bytes()
    assert ("KV on its way", "up to 320 MiB") in with_them.rows()
    assert not any(name == "KV on its way" for name, _ in without.rows())


def test_it_holds_the_slots_of_each_planned_connection() -> None:
    slots = DEVICE_NUM_CREDITS * DEVICE_MAX_CHUNK_BYTES
    assert planned_device_bytes() >= PLANNED_CONNECTIONS * slots


def test_sequences_of_windowed_layers_alone_take_their_window() -> None:
    window = 1000
    everywhere = replace(LAYOUT, window=window, windowed_layers=(0, 1))
    within, full = plan(0, everywhere), plan(0, replace(everywhere, windowed_layers=(1,)))
    assert (within.num_blocks, within.longest_context) == (full.num_blocks, 4096)
    assert full.num_longest_seqs == plan(0).num_longest_seqs == full.num_blocks // (4096 // 16)
    most = window + 2 * LAYOUT.block_size
    assert within.num_longest_seqs >= within.num_kv_tokens // most > 3 * full.num_longest_seqs

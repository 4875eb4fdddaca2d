"""The memory plan leaves room for KV on its way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.kv_transports import (
    DEVICE_MAX_CHUNK_BYTES,
    DEVICE_NUM_CREDITS,
    PLANNED_CONNECTIONS,
    planned_device_bytes,
)
from baton.types import KvLayout
from engine.families.config import ExpertsConfig, ModelConfig, Traits
from engine.families.read import read_config
from engine.memory_plan import MemoryPlan, num_linear_weights, plan_blocks, weight_bytes
from engine.ranks.mesh import ONE_RANK, Degrees, stage_layers
from tests.support.rank_specs import BOX

LAYOUT = KvLayout("", 2, 2, 64, "bfloat16", 16)
MIB = 1 << 20


def plan(
    transfers: int,
    layout: KvLayout = LAYOUT,
    degrees: Degrees = ONE_RANK,
    max_window_slots: int = 0,
) -> MemoryPlan:
    return plan_blocks(
        layout,
        dtype="bfloat16",
        weights=64 * MIB,
        activations=MIB,
        graphs=0,
        max_model_len=4096,
        max_num_seqs=4096,
        available_bytes=1024 * MIB,
        degrees=degrees,
        kv_cache_memory_bytes=None,
        num_blocks=None,
        transfers=transfers,
        max_window_slots=max_window_slots,
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


def test_the_rank_with_the_most_layers_decides() -> None:
    five, three = (replace(LAYOUT, num_layers=num) for num in (5, 3))
    assert plan(0, five, Degrees(pipeline=2)).block_bytes == three.block_bytes
    # Of the windowed layers the first stage has two, of the others the second one.
    window = replace(LAYOUT, num_layers=4, window=64, windowed_layers=(0, 1))
    slots = plan(0, window, Degrees(pipeline=2), max_window_slots=9)
    assert slots.slot_bytes == slots.block_bytes == LAYOUT.block_bytes


MIXTURE = replace(
    read_config(BOX),
    num_layers=5,
    windows=(None, 5, None, 5, None),
    traits=Traits(experts=ExpertsConfig((False, True, True, False, True), 8, 2, 64)),
)


@pytest.mark.parametrize("config", [read_config(BOX), MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_stages_have_all_layers_once(config: ModelConfig, num_stages: int) -> None:
    parts = [config.of_layers(own) for own in stage_layers(config.num_layers, num_stages)]
    assert sum(map(num_linear_weights, parts)) == num_linear_weights(config)
    assert sum((part.windows for part in parts), ()) == config.windows
    embeddings = 2 * 2 * config.vocab_size * config.hidden_size
    first, *others = (weight_bytes(part, "bfloat16", False) for part in parts)
    most = weight_bytes(config, "bfloat16", False, Degrees(pipeline=num_stages))
    # Only the first stage has embeddings and an output layer.
    assert most == max(first, *(each - embeddings for each in others))


def plan_default(
    max_model_len: int, default_kv_bytes: int, degrees: Degrees = ONE_RANK, max_num_seqs: int = 64
) -> MemoryPlan:
    return plan_blocks(
        LAYOUT,
        dtype="bfloat16",
        weights=64 * MIB,
        activations=MIB,
        graphs=0,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        available_bytes=1 << 40,
        degrees=degrees,
        kv_cache_memory_bytes=None,
        num_blocks=None,
        default_kv_bytes=default_kv_bytes,
    )


@pytest.mark.parametrize(
    ("max_model_len", "max_num_seqs", "num_tokens"),
    [
        (2048, 64, 16 * 2048),
        (2048, 4, 4 * 2048),
        (40_000, 64, 16 * 8192),
        (200_000, 64, 200_000),
    ],
)
def test_by_default_a_cpu_has_kv_for_sixteen_sequences(
    max_model_len: int, max_num_seqs: int, num_tokens: int
) -> None:
    found = plan_default(max_model_len, 1 << 40, max_num_seqs=max_num_seqs)
    assert found.num_kv_tokens == num_tokens
    assert any("--kv-cache-memory-bytes" in text for _, text in found.rows())


@pytest.mark.parametrize("degrees", [ONE_RANK, Degrees(tensor=2), Degrees(pipeline=2)])
def test_by_default_kv_takes_a_bounded_part_of_memory(degrees: Degrees) -> None:
    found = plan_default(8192, 10 * MIB, degrees)
    assert 9 * MIB < found.kv_bytes * degrees.num_ranks <= 10 * MIB

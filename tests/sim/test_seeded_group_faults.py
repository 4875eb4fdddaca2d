"""The simulated mix of a model with slots for windowed layers finds its faults: each fault that is
seeded here into the code fails one of its first seeds."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engine.kv.blocks import Blocks
from engine.kv.groups.window import WINDOWED, WindowSlots
from engine.kv.layout import LayerGroups
from engine.kv.prefix_index import PrefixIndex
from engine.kv.range import KvRange
from engine.kv.tensors.grouped import GroupedKvPool
from engine.oracle import OracleLayers
from tests.sim.test_mix import run_seed
from worker_core.swap import SwapSpace

pytestmark = pytest.mark.slow

Mutate = Callable[[pytest.MonkeyPatch], None]
AnyPool = GroupedKvPool[Any]

SEEDS = range(24)


def a_step_sees_a_window_that_is_a_block_short(patch: pytest.MonkeyPatch) -> None:
    """In the place of its first block is another one."""
    slot_table = GroupedKvPool.slot_table

    def table_of(self: AnyPool, block_table: Any, start: int, end: int) -> Any:
        table = slot_table(self, block_table, start, end)
        first = max(0, start - self.layout.window + 1) // self.layout.block_size
        if first < len(table) - 1:
            table[first] = table[first + 1]
        return table

    patch.setattr(GroupedKvPool, "slot_table", table_of)


def windowed_layers_are_not_copied(patch: pytest.MonkeyPatch) -> None:
    def copy(self: AnyPool, sources: Any, targets: Any) -> None:
        self.in_blocks.copy_blocks(sources, targets)

    patch.setattr(GroupedKvPool, "copy_rows", copy)


def what_is_copied_lands_in_its_source(patch: pytest.MonkeyPatch) -> None:
    """Copied rows of windowed layers land in their source."""
    copy_blocks = GroupedKvPool.copy_rows

    def copy(self: AnyPool, sources: Any, targets: Any) -> None:
        copy_blocks(self, sources, targets)
        slots = self.slot_tables[WINDOWED].of_block
        pairs = [(slots[s], slots[t]) for s, t in zip(sources, targets, strict=True)]
        for source, target in pairs:
            if source >= 0:
                self.in_slots.data[target] = 0

    patch.setattr(GroupedKvPool, "copy_rows", copy)


def chunks_are_placed_by_block(patch: pytest.MonkeyPatch) -> None:
    """Those of windowed layers, on both sides."""

    def ids_in(self: AnyPool, group: int, block_ids: Any) -> Any:
        num_slots = self.slot_tables[WINDOWED].num_slots
        return [i % num_slots for i in block_ids] if group == WINDOWED else block_ids

    patch.setattr(GroupedKvPool, "ids_in", ids_in)


def chunks_are_read_from_the_next_slot(patch: pytest.MonkeyPatch) -> None:
    pack_parts = GroupedKvPool.pack_parts

    def pack(self: AnyPool, block_ids: Any, piece: KvRange, parts: Any) -> None:
        pack_parts(self, block_ids, piece, parts)
        if piece.group == WINDOWED:
            num_slots = self.slot_tables[WINDOWED].num_slots
            slots, own = self._within(block_ids, piece)
            self.in_slots.pack_parts([(slot + 1) % num_slots for slot in slots], own, parts)

    patch.setattr(GroupedKvPool, "pack_parts", pack)


def the_last_windowed_layer_is_not_written(patch: pytest.MonkeyPatch) -> None:
    unpack_parts = GroupedKvPool.unpack_parts

    def all_but_last(self: AnyPool, block_ids: Any, piece: KvRange, parts: Any) -> None:
        if piece.group == WINDOWED and piece.end_layer == self.in_slots.layout.num_layers:
            piece = replace(piece, num_layers=piece.num_layers - 1)
            parts = [part[: piece.num_layers] for part in parts]
        unpack_parts(self, block_ids, piece, parts)

    patch.setattr(GroupedKvPool, "unpack_parts", all_but_last)


def a_slot_is_not_given_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WindowSlots, "give_back", lambda *_, **__: None)


def a_slot_that_is_held_is_taken(patch: pytest.MonkeyPatch) -> None:
    """Where none is free, though others are cached."""
    take = WindowSlots.take

    def take_held(self: WindowSlots, block_id: int) -> None:
        held = [i for i, count in enumerate(self._references) if count]
        if self._free or not held:
            take(self, block_id)
            return
        self.of_block[block_id], self.of_block[held[0]] = self.of_block[held[0]], -1
        self._references[block_id] = 1

    patch.setattr(WindowSlots, "take", take_held)


def a_window_is_given_back_a_block_early(patch: pytest.MonkeyPatch) -> None:
    first_needed = Blocks.first_needed
    patch.setattr(Blocks, "first_needed", lambda *args: first_needed(*args) + 1)


def a_block_whose_slot_went_to_another_is_found_as_whole(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixIndex, "set_partial", lambda *_: None)


def a_prefix_is_found_without_its_window(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixIndex, "_usable", lambda _self, blocks: (len(blocks), len(blocks)))


def a_shared_window_goes_along_with_the_first_to_write(patch: pytest.MonkeyPatch) -> None:
    def on_copy(self: WindowSlots, held: set[int], place: int, source: int, target: int) -> None:
        if place in held:
            self._move(source, target)
            self._index.set_partial(source)

    patch.setattr(WindowSlots, "on_copy", on_copy)


def the_window_is_sent_a_block_short(patch: pytest.MonkeyPatch) -> None:
    """Both sides agree on that."""
    whole_start = LayerGroups.whole_start

    def later(self: LayerGroups, num_tokens: int) -> int:
        start, size = whole_start(self, num_tokens), self.layout.block_size
        return start + size if start + size < num_tokens else start

    patch.setattr(LayerGroups, "whole_start", later)


def the_window_is_not_swapped(patch: pytest.MonkeyPatch) -> None:
    pieces = SwapSpace._pieces

    def full_alone(self: SwapSpace, num_tokens: int) -> Any:
        return [piece for piece in pieces(self, num_tokens) if piece.group != WINDOWED]

    patch.setattr(SwapSpace, "_pieces", full_alone)


def run_seeds() -> None:
    for seed in SEEDS:
        layers = OracleLayers(random.Random(seed).choice([1, 5, 16]))
        run_seed(seed, layers, has_window_slots=True)


@pytest.mark.parametrize(
    "mutate",
    [
        a_step_sees_a_window_that_is_a_block_short,
        windowed_layers_are_not_copied,
        what_is_copied_lands_in_its_source,
        chunks_are_placed_by_block,
        chunks_are_read_from_the_next_slot,
        the_last_windowed_layer_is_not_written,
        a_slot_is_not_given_back,
        a_slot_that_is_held_is_taken,
        a_window_is_given_back_a_block_early,
        a_block_whose_slot_went_to_another_is_found_as_whole,
        a_prefix_is_found_without_its_window,
        a_shared_window_goes_along_with_the_first_to_write,
        the_window_is_sent_a_block_short,
        the_window_is_not_swapped,
    ],
)
def test_a_seeded_fault_is_found(mutate: Mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run_seeds()

"""A new kind of KV is one file: here one that a test defines, which the pool, the wire, swapping
and the oracle take without a change. Its layers attend to the tokens of their own chunk (as those
of Llama 4) and the one before it, so what they keep goes all at once when a chunk is full."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import pytest

from baton.types import KvLayout, Sampling
from engine.kv import groups
from engine.kv.groups.full import FullGroup
from engine.kv.groups.group import GroupAllocator, LayerGroup, SlotTable
from engine.kv.groups.window import WindowSlots
from engine.kv.layout import groups_of
from engine.oracle import OracleLayers, oracle_tokens
from tests.sim.test_mix import run_seed

CHUNK = 6


class ChunkGroup(LayerGroup):
    """Layers that a layout lists as windowed; the window is the chunk's length in tokens."""

    number: ClassVar[int] = 9

    def __init__(self, layers: Sequence[int], layer_bytes: int, size: int) -> None:
        super().__init__(layers, layer_bytes)
        self._size = size

    @classmethod
    def of(cls, layout: KvLayout, rest: Sequence[int]) -> ChunkGroup | None:
        layers = [layer for layer in rest if layer in layout.windowed_layers]
        return cls(layers, layout.token_layer_bytes, layout.window) if layers else None

    def kept_start(self, num_tokens: int) -> int:
        # The oracle computes a token's KV from that of the token before.
        return max(0, num_tokens // self._size * self._size - 1)

    def max_slots(self, max_num_seqs: int, max_num_batched_tokens: int, block_size: int) -> int:
        own = -(-self._size // block_size) + 2
        return max_num_seqs * own + -(-2 * max_num_batched_tokens // block_size)

    def allocator(self, table: SlotTable) -> GroupAllocator:
        return WindowSlots(table)


@pytest.fixture(autouse=True)
def chunks_in_place_of_windows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(groups, "KINDS", (ChunkGroup, FullGroup))
    groups_of.cache_clear()
    yield
    groups_of.cache_clear()


def test_its_layers_see_their_chunk_alone() -> None:
    """Else the runs below would show nothing: another length is another output."""
    long, short = (
        oracle_tokens([1, 2, 3] * 4, Sampling(max_tokens=5), 1000, layers=OracleLayers(size))
        for size in (CHUNK, 4)
    )
    assert long != short


@pytest.mark.slow
@pytest.mark.parametrize("has_slots", [False, True])
@pytest.mark.parametrize("has_full_layers", [False, True])
def test_streams_are_whole_and_right(mix_seed: int, has_full_layers: bool, has_slots: bool) -> None:
    layers = OracleLayers(CHUNK, has_full_layers=has_full_layers)
    run_seed(mix_seed, layers, has_window_slots=has_slots and has_full_layers)

"""KV blocks of a model that has windowed and full layers, in two pools: a block has the KV of full
layers, and a slot that of windowed ones, of a block in somebody's window."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

import numpy as np

from baton.types import KvGroup, KvLayout, KvRange
from engine.interface import HostOrdered, KvPool, SlotTable
from engine.kv.tensors.packed import PackedPart, PackedPool


class LayersPool(KvPool, Protocol):
    """Blocks of layers that lie side by side, in host memory."""

    def pack_parts(
        self, block_ids: Sequence[int], piece: KvRange, parts: Sequence[PackedPart]
    ) -> None:
        """See PackedPool."""
        ...

    def unpack_parts(
        self, block_ids: Sequence[int], piece: KvRange, parts: Sequence[PackedPart]
    ) -> None:
        """See PackedPool."""
        ...


P = TypeVar("P", bound=LayersPool)


class GroupedKvPool(HostOrdered, PackedPool, Generic[P]):
    """See engine.interface.KvPool. full: the KV of full layers, by block; windowed: that of
    windowed layers, by slot; both number the layers that they have from 0 on."""

    slots: SlotTable

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        num_window_slots: int,
        make_pool: Callable[[KvLayout, int], P],
    ) -> None:
        """layout: of the whole model's KV. num_window_slots: at least 1. make_pool: called for the
        full layers, then for the windowed ones, with the layout of these and how many blocks there
        are to be."""
        super().__init__(layout, num_blocks)
        table = SlotTable.of_blocks(num_blocks, num_window_slots)
        self.slots, self._slot_of = table, table.of_block
        # The same memory.
        self._slots = np.frombuffer(table.of_block, dtype=np.int64)
        self.full = make_pool(layout.of_group(KvGroup.FULL), num_blocks)
        self.windowed = make_pool(layout.of_group(KvGroup.WINDOWED), num_window_slots)
        self.pools: Mapping[KvGroup, P] = MappingProxyType(
            {KvGroup.FULL: self.full, KvGroup.WINDOWED: self.windowed}
        )
        """See kv_transfer.codec.GroupedPool."""

    def window_table(self, block_table: Sequence[int], start: int, end: int) -> array[int]:
        """A block table as windowed layers have it, of a sequence whose tokens [start, end) are
        new: slots of the blocks that these attend to; what is said of others means nothing. A
        negative one: there is none."""
        size = self.layout.block_size
        first = max(0, start - self.layout.window + 1) // size
        blocks = np.array(block_table[first : -(-end // size)], dtype=np.int64)
        table = array("q", bytes(8 * first))
        table.frombytes(self._slots[blocks].tobytes())
        return table

    def check(self, block_ids: Sequence[int], piece: KvRange) -> None:
        """See PackedPool. Raises ValueError also where a block has no slot."""
        super().check(block_ids, piece)
        for part in self.layout.by_group(piece):
            self._within(block_ids, part)

    def pieces_of(self, piece: KvRange) -> Iterable[KvRange]:
        """See PackedPool."""
        if piece.group is not KvGroup.ALL:
            return (piece,)
        return (own for _, own in self.layout.runs_of_group(piece))

    def pack_parts(
        self, block_ids: Sequence[int], piece: KvRange, parts: Sequence[PackedPart]
    ) -> None:
        """See PackedPool."""
        self.pools[piece.group].pack_parts(*self._within(block_ids, piece), parts)

    def unpack_parts(
        self, block_ids: Sequence[int], piece: KvRange, parts: Sequence[PackedPart]
    ) -> None:
        """See PackedPool."""
        self.pools[piece.group].unpack_parts(*self._within(block_ids, piece), parts)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See KvPool."""
        self.full.copy_blocks(sources, targets)
        slot_of = self._slot_of
        pairs = [
            (slot_of[source], slot_of[target])
            for source, target in zip(sources, targets, strict=True)
            if slot_of[source] >= 0
        ]
        if pairs:
            self.windowed.copy_blocks(*zip(*pairs, strict=True))

    def ids_in(self, group: KvGroup, block_ids: Sequence[int]) -> Sequence[int]:
        """See kv_transfer.codec.GroupedPool: of windowed layers the blocks' slots. Raises
        ValueError where a block has none."""
        if group is not KvGroup.WINDOWED:
            return block_ids
        slots = [self._slot_of[block_id] for block_id in block_ids]
        if min(slots, default=0) < 0:
            raise ValueError("a block has no slot for the KV of windowed layers")
        return slots

    def _within(self, block_ids: Sequence[int], piece: KvRange) -> tuple[Sequence[int], KvRange]:
        """A group's range as its pool has it: the blocks or slots that its tokens are in, and the
        range within these."""
        size = self.layout.block_size
        first = piece.first_token // size
        blocks = block_ids[first : -(-piece.end_token // size)]
        within = replace(piece, first_token=piece.first_token - first * size, group=KvGroup.ALL)
        return self.ids_in(piece.group, blocks), within

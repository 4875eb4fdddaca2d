"""KV in two memories: blocks with the rows of layers that keep all tokens, and slots with those of
layers that keep fewer, for blocks still needed there."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

import numpy as np

from baton.types import KvLayout
from engine.kv.groups.group import SlotTable
from engine.kv.interface import BlockMemory, KvPool
from engine.kv.range import ALL, KvRange
from engine.kv.tensors.packed import ALL_HEADS, PackedPart, PackedPool


class LayersPool(KvPool, BlockMemory, Protocol):
    """Memory with the layers of each block side by side."""

    def pack_parts(
        self,
        block_ids: Sequence[int],
        piece: KvRange,
        parts: Sequence[PackedPart],
        heads: slice = ALL_HEADS,
    ) -> None:
        """See PackedPool."""
        ...

    def unpack_parts(
        self,
        block_ids: Sequence[int],
        piece: KvRange,
        parts: Sequence[PackedPart],
        heads: slice = ALL_HEADS,
    ) -> None:
        """See PackedPool."""
        ...


P = TypeVar("P", bound=LayersPool)


class GroupedKvPool(PackedPool, Generic[P]):
    """See engine.kv.interface.KvPool.

    in_blocks: rows of the group that keeps all tokens, by block; in_slots: rows of the other group,
    by slot. Both number their layers from 0.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        num_slots: int,
        make_pool: Callable[[KvLayout, int], P],
        table: SlotTable | None = None,
    ) -> None:
        """layout: with two paged groups. num_slots: at least 1. make_pool: called with (layout,
        number of blocks) for the layers in blocks, then for those in slots. table: slots that are
        assigned elsewhere; by default, a table of its own."""
        super().__init__(layout, num_blocks)
        kept, apart = self.groups.kept_and_apart
        table = table or SlotTable.empty(num_blocks, num_slots)
        self.slot_tables = {apart.number: table}
        self._apart, self._slot_of = apart, table.of_block
        # Shares the memory of the table.
        self._slots = np.frombuffer(table.of_block, dtype=np.int64)
        self.in_blocks = make_pool(self.groups.layout_of(kept.number), num_blocks)
        self.in_slots = make_pool(self.groups.layout_of(apart.number), num_slots)
        self.can_pack = self.in_blocks.can_pack
        self.pools: Mapping[int, P] = {kept.number: self.in_blocks, apart.number: self.in_slots}

    def mark(self) -> object:
        """See KvPool. One for both memories, which are on one device."""
        return next(iter(self.pools.values())).mark()

    def follow(self, mark: object) -> None:
        """See KvPool."""
        for pool in self.pools.values():
            pool.follow(mark)

    def synchronize(self) -> None:
        """See KvPool."""
        for pool in self.pools.values():
            pool.synchronize()

    def slot_table(self, block_table: Sequence[int], start: int, end: int) -> array[int]:
        """Block table in slots, for a sequence with new tokens [start, end): the slots of the
        blocks that these attend to, negative where there is none. Other entries are meaningless."""
        size = self.layout.block_size
        first = self._apart.kept_start(start) // size
        blocks = np.array(block_table[first : -(-end // size)], dtype=np.int64)
        table = array("q", bytes(8 * first))
        table.frombytes(self._slots[blocks].tobytes())
        return table

    def check(self, block_ids: Sequence[int], piece: KvRange) -> None:
        """See PackedPool. Also raises ValueError for a block without a slot."""
        super().check(block_ids, piece)
        for part in self.groups.split(piece):
            self._within(block_ids, part)

    def pieces_of(self, piece: KvRange) -> Iterable[KvRange]:
        if piece.group != ALL:
            return (piece,)
        return (own for _, own in self.groups.runs(piece))

    def pack_parts(
        self,
        block_ids: Sequence[int],
        piece: KvRange,
        parts: Sequence[PackedPart],
        heads: slice = ALL_HEADS,
    ) -> None:
        self.pools[piece.group].pack_parts(*self._within(block_ids, piece), parts, heads)

    def unpack_parts(
        self,
        block_ids: Sequence[int],
        piece: KvRange,
        parts: Sequence[PackedPart],
        heads: slice = ALL_HEADS,
    ) -> None:
        self.pools[piece.group].unpack_parts(*self._within(block_ids, piece), parts, heads)

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.in_blocks.copy_blocks(sources, targets)
        slot_of = self._slot_of
        pairs = [
            (slot_of[source], slot_of[target])
            for source, target in zip(sources, targets, strict=True)
            if slot_of[source] >= 0 and slot_of[target] >= 0
        ]
        if pairs:
            self.in_slots.copy_blocks(*zip(*pairs, strict=True))

    def memory_of(self, group: int) -> BlockMemory | None:
        return self.pools.get(group)

    def ids_in(self, group: int, block_ids: Sequence[int]) -> Sequence[int]:
        """See KvPool: slots, for the group apart from the blocks."""
        if group != self._apart.number:
            return block_ids
        slots = [self._slot_of[block_id] for block_id in block_ids]
        if min(slots, default=0) < 0:
            raise ValueError(f"a block has no slot for the KV of group {group}")
        return slots

    def _within(self, block_ids: Sequence[int], piece: KvRange) -> tuple[Sequence[int], KvRange]:
        """A group's range in its own pool: the blocks or slots of its tokens, and the range within
        these."""
        size = self.layout.block_size
        first = piece.first_token // size
        blocks = block_ids[first : -(-piece.end_token // size)]
        within = replace(piece, first_token=piece.first_token - first * size, group=ALL)
        return self.ids_in(piece.group, blocks), within


class SlotsPool(GroupedKvPool[P]):
    """A GroupedKvPool of a rank without layers in blocks. Blocks are copied by the pool of all
    ranks."""

    def __init__(self, layout: KvLayout, table: SlotTable, in_slots: P) -> None:
        """layout: with one paged group, which keeps fewer than all tokens."""
        PackedPool.__init__(self, layout, len(table.of_block))
        (self._apart,) = self.groups.paged
        self.slot_tables = {self._apart.number: table}
        self._slot_of = table.of_block
        self.pools = {self._apart.number: in_slots}

"""A pool restricted to a part of its layers and KV heads."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from engine.kv.groups.group import SlotTable
from engine.kv.groups.state import STATE
from engine.kv.interface import BlockMemory, CheckedCopy, KvPool
from engine.kv.part import KvPart
from engine.kv.range import ALL, KvRange
from engine.kv.tensors.packed import (
    ALL_HEADS,
    NO_RECORDS,
    PackedPart,
    PackedPool,
    RecordMemory,
)


class DividablePool(KvPool, Protocol):
    """A pool that copies some of its heads; see PackedPool."""

    records: Mapping[int, RecordMemory]

    def check(self, block_ids: Sequence[int], piece: KvRange) -> None: ...

    def pieces_of(self, piece: KvRange) -> Iterable[KvRange]: ...

    def pack_parts(
        self,
        block_ids: Sequence[int],
        piece: KvRange,
        parts: Sequence[PackedPart],
        heads: slice = ...,
    ) -> None: ...

    def unpack_parts(
        self,
        block_ids: Sequence[int],
        piece: KvRange,
        parts: Sequence[PackedPart],
        heads: slice = ...,
    ) -> None: ...


def pool_part(pool: KvPool, part: KvPart) -> KvPool:
    """`part` of a pool, counted from the pool's first layer and head; the pool itself if that is
    all of it. Raises ValueError if the pool does not contain the part, or cannot be divided."""
    whole = KvPart.whole(pool.layout)
    if part == whole:
        return pool
    if part.overlap(whole) != part:
        raise ValueError(f"{part} is not within {whole}")
    if not isinstance(pool, PackedPool):
        raise ValueError(f"a {type(pool).__name__} is not divided")  # noqa: TRY004, a peer's part
    return PartKvPool(pool, part)


class PartKvPool(PackedPool):
    """See engine.kv.interface.KvPool: the blocks of another pool, with its layers and heads of
    `part`. Blocks are contiguous if the part has all heads."""

    def __init__(self, base: DividablePool, part: KvPart) -> None:
        """part: within the base, see pool_part."""
        records: Mapping[int, RecordMemory] = NO_RECORDS
        if part.num_states:
            records = {STATE: _LayersOfRecords(base.records[STATE], part.first_state)}
        super().__init__(part.layout(base.layout), base.num_blocks, records)
        self._base = base
        self._heads = slice(part.heads.start, part.heads.stop)
        self._has_all_heads = part.num_heads == base.layout.num_kv_heads
        #: By group, the base's layer that is the part's first one.
        self._first_layers = {ALL: part.first_layer} | {
            group.number: bisect_left(base.groups.layers(group.number), part.first_layer)
            for group in self.groups.paged
        }
        self.slot_tables = {
            number: table for number, table in base.slot_tables.items() if number in self.groups
        }
        self.mark, self.follow, self.synchronize = base.mark, base.follow, base.synchronize
        """See KvPool."""

    def check(self, block_ids: Sequence[int], piece: KvRange) -> None:
        super().check(block_ids, piece)
        self._base.check(block_ids, self._in_base(piece))

    def pieces_of(self, piece: KvRange) -> Iterable[KvRange]:
        """Ranges in the base's layers."""
        return self._base.pieces_of(self._in_base(piece))

    def pack_parts(
        self,
        block_ids: Sequence[int],
        piece: KvRange,
        parts: Sequence[PackedPart],
        heads: slice = ALL_HEADS,  # noqa: ARG002
    ) -> None:
        self._base.pack_parts(block_ids, piece, parts, self._heads)

    def unpack_parts(
        self,
        block_ids: Sequence[int],
        piece: KvRange,
        parts: Sequence[PackedPart],
        heads: slice = ALL_HEADS,  # noqa: ARG002
    ) -> None:
        self._base.unpack_parts(block_ids, piece, parts, self._heads)

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Not supported: the base copies whole blocks. Raises ValueError."""
        raise ValueError(f"a part of blocks {sources} is not copied to {targets}")

    def memory_of(self, group: int) -> BlockMemory | None:
        memory = self._base.memory_of(group)
        if memory is None or not self._has_all_heads:
            return memory and self
        return _LayersOf(memory, self._first_layers[group])

    def ids_in(self, group: int, block_ids: Sequence[int]) -> Sequence[int]:
        return self._base.ids_in(group, block_ids)

    def _in_base(self, piece: KvRange) -> KvRange:
        return replace(piece, first_layer=piece.first_layer + self._first_layers[piece.group])


@dataclass(frozen=True, slots=True)
class _LayersOfRecords:
    """Consecutive layers of a RecordMemory, see there."""

    memory: RecordMemory
    first_layer: int

    @property
    def slots(self) -> SlotTable:
        return self.memory.slots

    def pack(self, block_ids: Sequence[int], piece: KvRange, out: memoryview) -> None:
        self.memory.pack(block_ids, self._in_base(piece), out)

    def unpack(self, block_ids: Sequence[int], piece: KvRange, data: memoryview) -> None:
        self.memory.unpack(block_ids, self._in_base(piece), data)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Not supported: the base copies all layers. Raises ValueError."""
        raise ValueError(f"a part of the records of {sources} is not copied to {targets}")

    def _in_base(self, piece: KvRange) -> KvRange:
        return replace(piece, first_layer=piece.first_layer + self.first_layer)


class _LayersOf:
    """Consecutive layers of a BlockMemory, see there. The caller checks ranges."""

    def __init__(self, memory: BlockMemory, first_layer: int) -> None:
        self._memory = memory
        self._first = first_layer
        self.num_blocks = memory.num_blocks
        self.has_block_views = memory.has_block_views
        copy = memory.checked_copy
        self.checked_copy: CheckedCopy | None = copy and _CopyOfLayers(copy, first_layer)

    def block_view(self, block_id: int, first_layer: int, num_layers: int) -> memoryview:
        return self._memory.block_view(block_id, self._first + first_layer, num_layers)


@dataclass(frozen=True, slots=True)
class _CopyOfLayers:
    """A CheckedCopy of consecutive layers."""

    copy: CheckedCopy
    first_layer: int

    @property
    def copies_rows(self) -> bool:
        return self.copy.copies_rows

    @property
    def min_bytes(self) -> int:
        return self.copy.min_bytes

    def gather(
        self,
        block_ids: Sequence[int],
        tokens: tuple[int, int],
        layers: tuple[int, int],
        packed: memoryview,
        seed: int,
    ) -> int:
        return self.copy.gather(block_ids, tokens, self._in_base(layers), packed, seed)

    def scatter(
        self,
        block_ids: Sequence[int],
        tokens: tuple[int, int],
        layers: tuple[int, int],
        packed: memoryview,
        seed: int,
    ) -> int:
        return self.copy.scatter(block_ids, tokens, self._in_base(layers), packed, seed)

    def _in_base(self, layers: tuple[int, int]) -> tuple[int, int]:
        return self.first_layer + layers[0], layers[1]

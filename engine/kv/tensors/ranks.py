"""KV blocks with layers and heads distributed over the ranks of one engine."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from baton.types import KvLayout
from engine.kv.groups.group import SlotTable
from engine.kv.interface import HostOrdered, KvPool
from engine.kv.layout import groups_of
from engine.kv.part import KvPart
from engine.kv.range import KvRange
from engine.kv.tensors.grouped import GroupedKvPool, SlotsPool
from engine.kv.tensors.packed import ALL_HEADS, NO_RECORDS, PackedPart, PackedPool, RecordMemory
from engine.kv.tensors.paged import TorchKvPool

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class PoolSize:
    """A pool of all ranks. layout: of the whole pool; its fingerprint may be missing. parts: each
    rank's part of the layout; several ranks may have the same. holders: by rank, the rank that has
    its part in memory: itself, or the first rank of its context."""

    layout: KvLayout
    num_blocks: int
    parts: tuple[KvPart, ...]
    holders: tuple[int, ...]

    @property
    def num_memories(self) -> int:
        """Ranks with memory of their own."""
        return len(set(self.holders))

    @property
    def rank_bytes(self) -> list[int]:
        """Bytes of each rank's memory."""
        layouts = (part.layout(self.layout) for part in self.parts)
        return [
            self.num_blocks * layout.block_bytes if holder == rank else 0
            for rank, (layout, holder) in enumerate(zip(layouts, self.holders, strict=True))
        ]

    def memory_of(self, memory: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's part of the pool's shared memory, uint8."""
        return memory.split(self.rank_bytes)[self.holders[rank]]  # type: ignore[no-any-return, no-untyped-call]

    def own_pool(
        self, rank: int, device: torch.device, records: Mapping[int, RecordMemory] = NO_RECORDS
    ) -> TorchKvPool:
        """A rank's pool in memory of its own. records: see PackedPool."""
        own = self.parts[rank].layout(self.layout)
        return TorchKvPool(own, self.num_blocks, device, records=records)

    def pool_of(self, memory: torch.Tensor, rank: int) -> TorchKvPool:
        """A rank's pool in the shared memory."""
        own = self.parts[rank].layout(self.layout)
        return TorchKvPool(own, self.num_blocks, _CPU, self.memory_of(memory, rank))


def pool_sizes(
    layout: KvLayout,
    num_blocks: int,
    num_slots: int,
    parts: tuple[KvPart, ...],
    holders: tuple[int, ...] | None = None,
) -> tuple[PoolSize, ...]:
    """The pools: one, or two (blocks and slots, see GroupedKvPool). layout: of the whole model.
    parts, holders: of the ranks, see PoolSize; by default each holds its own."""
    holders = tuple(range(len(parts))) if holders is None else holders
    if not num_slots:
        return (PoolSize(layout, num_blocks, parts, holders),)
    groups = groups_of(layout)
    return tuple(
        PoolSize(groups.layout_of(group.number), count, _in_group(parts, group.layers), holders)
        for group, count in zip(groups.kept_and_apart, (num_blocks, num_slots), strict=True)
    )


def _in_group(parts: Sequence[KvPart], layers: Sequence[int]) -> tuple[KvPart, ...]:
    """The parts of a group with these layers, ascending, in the group's numbers of layers."""
    ends = [[bisect_left(layers, at) for at in (p.layers.start, p.layers.stop)] for p in parts]
    return tuple(
        replace(part, first_layer=first, num_layers=end - first)
        for part, (first, end) in zip(parts, ends, strict=True)
    )


def own_kv_pool(
    part: KvPart, layout: KvLayout, pools: Sequence[TorchKvPool], table: SlotTable | None = None
) -> KvPool:
    """One rank's pools (see pool_sizes) as a pool of its part of the model. layout: of the whole
    model. table: slots, assigned elsewhere; by default, a table of its own."""
    for pool in pools:
        pool.identify(layout.fingerprint)
    in_blocks, *apart = pools
    own = part.layout(layout)
    groups = groups_of(own).paged
    if not apart or (len(groups) == 1 and groups[0].keeps_all_tokens):
        return in_blocks
    (in_slots,) = apart
    table = table or SlotTable.empty(in_blocks.num_blocks, in_slots.num_blocks)
    if len(groups) == 1:
        return SlotsPool(own, table, in_slots)
    given = iter(pools)
    return GroupedKvPool(own, in_blocks.num_blocks, table.num_slots, lambda *_: next(given), table)


class ShardedKvPool(HostOrdered, PackedPool):
    """See engine.kv.interface.KvPool: the blocks of all ranks, used by rank 0. Packed data has all
    layers and heads.

    The number of ranks is therefore invisible to the KV channel and to the other tier. A part held
    by several ranks is written to all and read from the first. Blocks are not contiguous, so there
    are no block views. Copies run in the calling thread, without the GIL, as in TorchKvPool.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        size: PoolSize,
        layout: KvLayout,
        records: Mapping[int, RecordMemory] = NO_RECORDS,
    ) -> None:
        """memory: of all ranks' parts, uint8. layout: that of `size`, with its fingerprint.
        records: of all ranks, see PackedPool."""
        super().__init__(layout, size.num_blocks, records)
        parts = size.parts
        held = {rank: size.pool_of(memory, rank) for rank in sorted(set(size.holders))}
        self._pools = [(parts[rank], pool) for rank, pool in held.items()]
        self._first_pools = [
            (parts[rank], pool) for rank, pool in held.items() if parts[rank] not in parts[:rank]
        ]
        #: Memory of rank 0's forward: see TorchKvPool.
        self.tensor, self.scales = self._pools[0][1].tensor, self._pools[0][1].scales

    def pack_parts(
        self,
        block_ids: Sequence[int],
        piece: KvRange,
        parts: Sequence[PackedPart],
        heads: slice = ALL_HEADS,
    ) -> None:
        for pool, own, packed, held in self._overlaps(self._first_pools, piece, parts, heads):
            pool.pack_parts(block_ids, own, packed, held)

    def unpack_parts(
        self,
        block_ids: Sequence[int],
        piece: KvRange,
        parts: Sequence[PackedPart],
        heads: slice = ALL_HEADS,
    ) -> None:
        for pool, own, packed, held in self._overlaps(self._pools, piece, parts, heads):
            pool.unpack_parts(block_ids, own, packed, held)

    @property
    def own(self) -> TorchKvPool:
        """Rank 0's pool."""
        return self._pools[0][1]

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for _, pool in self._pools:
            pool.copy_blocks(sources, targets)

    def _overlaps(
        self,
        pools: Sequence[tuple[KvPart, TorchKvPool]],
        piece: KvRange,
        parts: Sequence[PackedPart],
        heads: slice,
    ) -> Iterator[tuple[TorchKvPool, KvRange, list[PackedPart], slice]]:
        """The pools with some of a piece: (pool, the range in it, its packed data, its heads)
        each."""
        first, end, _ = heads.indices(self.layout.num_kv_heads)
        wanted = KvPart(piece.first_layer, piece.num_layers, first, end - first)
        for part, pool in pools:
            if common := part.overlap(wanted):
                own, packed = common.within(part), common.within(wanted)
                layers, columns, held = (
                    slice(at.start, at.stop) for at in (packed.layers, packed.heads, own.heads)
                )
                within = replace(piece, first_layer=own.first_layer, num_layers=own.num_layers)
                yield pool, within, [bits[layers, :, columns] for bits in parts], held

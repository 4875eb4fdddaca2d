"""KV blocks whose heads are spread over the ranks of one engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from baton.types import KvLayout
from engine.kv.interface import HostOrdered
from engine.kv.layout import groups_of
from engine.kv.range import KvRange
from engine.kv.tensors.packed import PackedPart, PackedPool
from engine.kv.tensors.paged import TorchKvPool
from engine.shard import Shard

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class PoolSize:
    """layout: of all heads; its fingerprint may be missing."""

    layout: KvLayout
    num_blocks: int


def pool_sizes(layout: KvLayout, num_blocks: int, num_slots: int) -> tuple[PoolSize, ...]:
    """The pools that each rank has: one, or that of blocks and that of slots, see GroupedKvPool.
    layout: of the whole model's KV."""
    if not num_slots:
        return (PoolSize(layout, num_blocks),)
    groups = groups_of(layout)
    kept, apart = sorted(groups.paged, key=lambda group: not group.keeps_all_tokens)
    return (
        PoolSize(groups.layout_of(kept.number), num_blocks),
        PoolSize(groups.layout_of(apart.number), num_slots),
    )


def shard_layout(layout: KvLayout, shard: Shard) -> KvLayout:
    """What a rank's own blocks hold of the model's `layout`."""
    return replace(layout, num_kv_heads=len(shard.kv_heads(layout.num_kv_heads)))


def pool_bytes(layout: KvLayout, num_blocks: int, size: int) -> int:
    """Bytes of the pools of all ranks."""
    return size * num_blocks * shard_layout(layout, Shard(0, size)).block_bytes


def pool_memories(
    memory: torch.Tensor, pools: Sequence[PoolSize], size: int
) -> tuple[torch.Tensor, ...]:
    """The memory of all ranks, uint8, as that of each pool, in order."""
    return memory.split([pool_bytes(pool.layout, pool.num_blocks, size) for pool in pools])  # type: ignore[no-any-return, no-untyped-call]


def rank_memory(
    memory: torch.Tensor, layout: KvLayout, num_blocks: int, shard: Shard
) -> torch.Tensor:
    """A rank's part of the memory [pool_bytes] uint8 of all."""
    num_bytes = num_blocks * shard_layout(layout, shard).block_bytes
    return memory[shard.rank * num_bytes : (shard.rank + 1) * num_bytes]


def rank_pool(memory: torch.Tensor, layout: KvLayout, num_blocks: int, shard: Shard) -> TorchKvPool:
    """A rank's own pool in the memory of all, with the KV heads that it has of the model's
    `layout`."""
    own = rank_memory(memory, layout, num_blocks, shard)
    return TorchKvPool(shard_layout(layout, shard), num_blocks, _CPU, own)


class ShardedKvPool(HostOrdered, PackedPool):
    """See engine.kv.interface.KvPool: the blocks of all ranks, as rank 0 sees them. What goes
    out and comes in has all heads.

    So neither the KV channel nor the other tier knows how many ranks there are. Ranks that hold the
    same head are written alike, and the first of them is read. No whole block lies in one piece, so
    none can be lent. As with TorchKvPool, copies run on the calling thread, without the GIL.
    """

    def __init__(self, memory: torch.Tensor, layout: KvLayout, num_blocks: int, size: int) -> None:
        """memory: pool_bytes of uint8 that all ranks share."""
        super().__init__(layout, num_blocks)
        shards = [Shard(rank, size) for rank in range(size)]
        heads = [shard.kv_heads(layout.num_kv_heads) for shard in shards]
        self._pools = [
            (slice(own.start, own.stop), rank_pool(memory, layout, num_blocks, shard))
            for own, shard in zip(heads, shards, strict=True)
        ]
        self._first_pools = [
            self._pools[rank] for rank in range(size) if heads[rank] not in heads[:rank]
        ]
        #: Rank 0's own, for its forward: see TorchKvPool.
        self.tensor, self.scales = self._pools[0][1].tensor, self._pools[0][1].scales

    def pack_parts(
        self, block_ids: Sequence[int], piece: KvRange, parts: Sequence[PackedPart]
    ) -> None:
        """See PackedPool."""
        for heads, pool in self._first_pools:
            pool.pack_parts(block_ids, piece, [part[:, :, heads] for part in parts])

    def unpack_parts(
        self, block_ids: Sequence[int], piece: KvRange, parts: Sequence[PackedPart]
    ) -> None:
        """See PackedPool."""
        for heads, pool in self._pools:
            pool.unpack_parts(block_ids, piece, [part[:, :, heads] for part in parts])

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See PackedPool."""
        for _, pool in self._pools:
            pool.copy_blocks(sources, targets)

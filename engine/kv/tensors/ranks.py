"""KV blocks with heads distributed over the ranks of one engine."""

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
    """The pools of each rank: one, or two (blocks and slots, see GroupedKvPool). layout: of the
    whole model."""
    if not num_slots:
        return (PoolSize(layout, num_blocks),)
    groups = groups_of(layout)
    kept, apart = groups.kept_and_apart
    return (
        PoolSize(groups.layout_of(kept.number), num_blocks),
        PoolSize(groups.layout_of(apart.number), num_slots),
    )


def shard_layout(layout: KvLayout, shard: Shard) -> KvLayout:
    """The model's `layout`, reduced to the heads of one rank."""
    return replace(layout, num_kv_heads=len(shard.kv_heads(layout.num_kv_heads)))


def pool_bytes(layout: KvLayout, num_blocks: int, size: int) -> int:
    """Bytes of the pools of all ranks."""
    return size * num_blocks * shard_layout(layout, Shard(0, size)).block_bytes


def pool_memories(
    memory: torch.Tensor, pools: Sequence[PoolSize], size: int
) -> tuple[torch.Tensor, ...]:
    """Split the memory of all ranks, uint8, by pool, in order."""
    return memory.split([pool_bytes(pool.layout, pool.num_blocks, size) for pool in pools])  # type: ignore[no-any-return, no-untyped-call]


def rank_memory(
    memory: torch.Tensor, layout: KvLayout, num_blocks: int, shard: Shard
) -> torch.Tensor:
    """One rank's part of the shared memory [pool_bytes] uint8."""
    num_bytes = num_blocks * shard_layout(layout, shard).block_bytes
    return memory[shard.rank * num_bytes : (shard.rank + 1) * num_bytes]


def rank_pool(memory: torch.Tensor, layout: KvLayout, num_blocks: int, shard: Shard) -> TorchKvPool:
    """One rank's pool in the shared memory, with its KV heads of the model's `layout`."""
    own = rank_memory(memory, layout, num_blocks, shard)
    return TorchKvPool(shard_layout(layout, shard), num_blocks, _CPU, own)


class ShardedKvPool(HostOrdered, PackedPool):
    """See engine.kv.interface.KvPool: the blocks of all ranks, used by rank 0. Packed data has all
    heads.

    The number of ranks is therefore invisible to the KV channel and to the other tier. A head held
    by several ranks is written to all and read from the first. Blocks are not contiguous, so there
    are no block views. Copies run in the calling thread, without the GIL, as in TorchKvPool.
    """

    def __init__(self, memory: torch.Tensor, layout: KvLayout, num_blocks: int, size: int) -> None:
        """memory: pool_bytes of uint8, shared by all ranks."""
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
        #: Memory of rank 0's forward: see TorchKvPool.
        self.tensor, self.scales = self._pools[0][1].tensor, self._pools[0][1].scales

    def pack_parts(
        self, block_ids: Sequence[int], piece: KvRange, parts: Sequence[PackedPart]
    ) -> None:
        for heads, pool in self._first_pools:
            pool.pack_parts(block_ids, piece, [part[:, :, heads] for part in parts])

    def unpack_parts(
        self, block_ids: Sequence[int], piece: KvRange, parts: Sequence[PackedPart]
    ) -> None:
        for heads, pool in self._pools:
            pool.unpack_parts(block_ids, piece, [part[:, :, heads] for part in parts])

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for _, pool in self._pools:
            pool.copy_blocks(sources, targets)

"""Which blocks are free, cached or leased, and how often: the books that a pool and its leases
share."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Protocol

from engine.kv.groups.group import GroupAllocator
from engine.kv.layout import LayerGroups
from engine.kv.prefix_index import PrefixIndex


class Leased(Protocol):
    """A lease, see engine.kv.lease."""

    @property
    def block_ids(self) -> Sequence[int]: ...

    @property
    def held_block_ids(self) -> Sequence[int]: ...

    @property
    def slots(self) -> tuple[set[int], ...]: ...


class Blocks:
    """The blocks of one pool. Changed by the pool and its leases alone, in one thread.

    references: by block, the leases that hold it. free, cached: blocks without a lease; cached ones
    least recently used first. leases: those not released, by id().
    """

    def __init__(
        self,
        num_blocks: int,
        groups: LayerGroups,
        secret: bytes,
        allocators: Sequence[GroupAllocator],
    ) -> None:
        self.num_blocks = num_blocks
        self.size = groups.layout.block_size
        """Tokens of a block."""
        self.allocators = tuple(allocators)
        self.groups = groups
        self.free = deque(range(num_blocks))
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.references = [0] * num_blocks
        self.gives_back = not groups.keeps_all_blocks
        """Whether blocks that a sequence no longer needs go back; else slots do, if there are
        any."""
        self.slides = self.gives_back or any(each.slides for each in allocators)
        self.written_places = tuple({p for each in allocators for p in each.written_places})
        self.index = PrefixIndex(self.size, secret, groups)
        for allocator in allocators:
            allocator.bind(self.index)
        self.leases: dict[int, Leased] = {}

    @property
    def num_available(self) -> int:
        """Blocks that can be had now: free ones, and cached ones that are given up."""
        return len(self.free) + len(self.cached)

    def num_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.size)

    def take(self) -> int:
        """A block that is available, for one lease."""
        if self.free:
            block_id = self.free.popleft()
        else:
            block_id, _ = self.cached.popitem(last=False)
            self.index.remove(block_id)
            for allocator in self.allocators:
                allocator.on_evicted(block_id)
        self.references[block_id] = 1
        return block_id

    def hold(self, block_id: int) -> None:
        """One lease more has it."""
        self.cached.pop(block_id, None)
        self.references[block_id] += 1

    def give_back(self, block_id: int) -> None:
        """One lease less has it."""
        self.references[block_id] -= 1
        if self.references[block_id]:
            return
        for allocator in self.allocators:
            allocator.on_freed(block_id)
        if block_id in self.index.by_block:
            self.cached[block_id] = None
        else:
            self.free.append(block_id)

    def on_unindexed(self, block_id: int) -> None:
        """A block that nobody finds any more is free, if nobody has it."""
        if not self.references[block_id]:
            del self.cached[block_id]
            self.free.append(block_id)

    def first_needed(self, num_full_blocks: int) -> int:
        """Place of the first block that a sequence needs in every group, to go on behind so many
        full ones."""
        return self.groups.kept_start(num_full_blocks * self.size) // self.size

"""State of each block (free, cached or leased) and its reference count, shared by a pool and its
leases."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Protocol

from engine.kv.groups.group import GroupAllocator
from engine.kv.layout import LayerGroups
from engine.kv.prefix_index import PrefixIndex


class Leased(Protocol):
    """The part of BlockLease that the block pool reads."""

    @property
    def block_ids(self) -> Sequence[int]: ...

    @property
    def held_block_ids(self) -> Sequence[int]: ...

    @property
    def slots(self) -> tuple[set[int], ...]: ...


class Blocks:
    """The blocks of one pool. Changed only by the pool and its leases, in one thread.

    references: leases per block. free, cached: blocks without a lease; cached ones least recently
    used first. leases: those not released, by id().
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
        """Tokens per block."""
        self.allocators = tuple(allocators)
        self.groups = groups
        self.free = deque(range(num_blocks))
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.unsaved: OrderedDict[int, None] | None = None
        """Cached blocks not yet given to the tiers, in the order of `cached`; None without tiers.
        """
        self.references = [0] * num_blocks
        self.num_gains = 0
        """Events that may make room for a sequence: blocks given back, and blocks indexed."""
        self.gives_back = not groups.keeps_all_blocks
        """Whether sequences give back blocks that they no longer need; otherwise they give back
        slots, if any."""
        self.slides = self.gives_back or any(each.slides for each in allocators)
        self.written_places = tuple({p for each in allocators for p in each.written_places})
        self.index = PrefixIndex(self.size, secret, groups)
        for allocator in allocators:
            allocator.bind(self.index)
        self.leases: dict[int, Leased] = {}

    @property
    def num_available(self) -> int:
        """Blocks available now: free ones, and cached ones that can be evicted."""
        return len(self.free) + len(self.cached)

    def num_for(self, num_tokens: int) -> int:
        """Blocks that hold num_tokens tokens."""
        return -(-num_tokens // self.size)

    def take(self) -> int:
        """Allocate an available block for one lease."""
        if self.free:
            block_id = self.free.popleft()
        else:
            block_id = next(iter(self.cached))
            self._uncache(block_id)
            self.index.remove(block_id)
            for allocator in self.allocators:
                allocator.on_evicted(block_id)
        self.references[block_id] = 1
        return block_id

    def hold(self, block_id: int) -> None:
        """Add a reference of one lease."""
        self._uncache(block_id)
        self.references[block_id] += 1

    def give_back(self, block_id: int) -> None:
        """Drop a reference of one lease."""
        self.references[block_id] -= 1
        if self.references[block_id]:
            return
        self.num_gains += 1
        for allocator in self.allocators:
            allocator.on_freed(block_id)
        if block_id in self.index.by_block:
            self.cached[block_id] = None
            if self.unsaved is not None:
                self.unsaved[block_id] = None
        else:
            self.free.append(block_id)

    def on_unindexed(self, block_id: int) -> None:
        """Free a block that left the prefix index, if no lease holds it."""
        if not self.references[block_id]:
            self._uncache(block_id)
            self.free.append(block_id)

    def _uncache(self, block_id: int) -> None:
        self.cached.pop(block_id, None)
        if self.unsaved:
            self.unsaved.pop(block_id, None)

    def first_needed(self, num_full_blocks: int) -> int:
        """Index of the first block that a sequence of num_full_blocks full blocks still needs in
        any group."""
        return self.groups.kept_start(num_full_blocks * self.size) // self.size

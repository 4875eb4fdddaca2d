"""Slots for the KV of windowed layers, of a model that has full layers, too.

The KV of a block's full layers is in the block, which a sequence holds as long as it runs. That of
its windowed layers is in a slot, which it holds while the block is in its window: so there are
fewer slots than blocks. A block has one slot or none:

        take                    give_back, the block is not found as whole
free ─────────▶ held ──────────────────────────────────────────────▶ free
                 ▲  │ give_back, it is
            hold │  ▼
               cached ─── taken, least recently given back first ─▶ held by another block

A cached slot's block can be found as part of a prefix with the KV of all its layers; a block that
has lost its slot is found without that of the windowed ones. Slots are changed by the thread of the
block pool; `of_block` is read by those that copy KV, too, of blocks that are theirs meanwhile.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable

from baton.types import BlockCounts


class WindowSlots:
    """All slots of one worker."""

    def __init__(self, num_slots: int, of_block: array[int]) -> None:
        """of_block: by block id, the block's slot, in [0, num_slots); -1 if it has none, as all at
        first. The engine reads it, and this alone changes it."""
        self.num_slots = num_slots
        self.of_block = of_block
        self._free = deque(range(num_slots))
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Blocks whose slots nobody holds, the one given back first first."""
        self._references = [0] * len(of_block)
        """Leases that hold a block's slot."""

    def counts(self) -> BlockCounts:
        free, cached = len(self._free), len(self._cached)
        return BlockCounts(free=free, cached=cached, leased=self.num_slots - free - cached)

    @property
    def num_available(self) -> int:
        """Slots that can be had now: free ones, and cached ones that are given up."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_slots - self.num_available

    def num_references(self, block_id: int) -> int:
        """Leases that hold the block's slot."""
        return self._references[block_id]

    def take(self, block_id: int) -> int | None:
        """Give a block without a slot one that is available. Returns the block that loses its own,
        if one does."""
        loser = None
        if self._free:
            slot = self._free.popleft()
        else:
            loser, _ = self._cached.popitem(last=False)
            slot, self.of_block[loser] = self.of_block[loser], -1
        self.of_block[block_id] = slot
        self._references[block_id] = 1
        return loser

    def hold(self, block_id: int) -> None:
        """One lease more holds the block's slot, which it has."""
        self._cached.pop(block_id, None)
        self._references[block_id] += 1

    def give_back(self, block_id: int, *, is_whole: bool) -> None:
        """One lease less holds the block's slot. is_whole: others can find the block, with the KV
        of all its layers."""
        self._references[block_id] -= 1
        if self._references[block_id]:
            return
        if is_whole:
            self._cached[block_id] = None
        else:
            self._free_slot(block_id)

    def move(self, source: int, target: int) -> None:
        """The slot of block `source`, with what it holds, becomes that of `target`, which has none.
        One lease holds it."""
        self.of_block[target], self.of_block[source] = self.of_block[source], -1
        self._references[target], self._references[source] = 1, 0

    def drop(self, block_id: int) -> None:
        """A block that nobody holds is to hold something else: its slot, if it has one, is free."""
        if block_id in self._cached:
            del self._cached[block_id]
            self._free_slot(block_id)

    def check_integrity(self, held: Iterable[int], indexed: set[int]) -> None:
        """Raises AssertionError unless each slot is in exactly one state. held: blocks whose slots
        leases hold, once for each lease; indexed: blocks that are found with the KV of all
        layers."""
        expected = [0] * len(self.of_block)
        for block_id in held:
            expected[block_id] += 1
        used = [slot for slot in self.of_block if slot >= 0]
        with_slot = {block_id for block_id, slot in enumerate(self.of_block) if slot >= 0}
        with_owner = {block_id for block_id, count in enumerate(expected) if count}
        faults = {
            "references to slots differ from the leases": expected != self._references,
            "a slot is in two states": len({*used, *self._free}) != len(used) + len(self._free),
            "a slot is lost": len(used) + len(self._free) != self.num_slots,
            "a slot is of no lease and not cached": with_slot != with_owner | self._cached.keys(),
            "a cached slot is of a lease": not with_owner.isdisjoint(self._cached),
            "a cached slot cannot be found": not self._cached.keys() <= indexed,
            "a block without a slot is found as whole": not indexed <= with_slot,
        }
        found = [fault for fault, is_there in faults.items() if is_there]
        if found:
            raise AssertionError("; ".join(found))

    def _free_slot(self, block_id: int) -> None:
        self._free.append(self.of_block[block_id])
        self.of_block[block_id] = -1

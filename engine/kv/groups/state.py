"""Slots for the states of sequences, of a model that has layers with a state.

A sequence has one slot, with the states of all such layers: that of its first block, which its
lease holds as long as it runs. So a slot has the owners that the block has, and goes where it goes:
to a ticket's writer, to the sender of a handoff, into a fork, and back to the pool. Every step of a
sequence writes its states: of two that share their first block after a fork, the first to go on
takes a block, and a slot, of its own (copy-on-write).

Slots are changed by the thread of the block pool; `of_block` is read by those that copy states,
too, of blocks that are theirs meanwhile.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable


class StateSlots:
    """All slots of one worker."""

    def __init__(self, num_slots: int, of_block: array[int]) -> None:
        """of_block: by block id, the slot of the sequence that begins with the block, in
        [0, num_slots); -1 of others, as of all at first. The engine reads it, and this alone
        changes it."""
        self.num_slots = num_slots
        self.of_block = of_block
        self._free = deque(range(num_slots))

    @property
    def num_available(self) -> int:
        return len(self._free)

    def take(self, block_id: int) -> None:
        """Give a block without a slot one that is available."""
        self.of_block[block_id] = self._free.popleft()

    def give_back(self, block_id: int) -> None:
        """A block that nobody holds any more: its slot, if it has one, is free."""
        if self.of_block[block_id] >= 0:
            self._free.append(self.of_block[block_id])
            self.of_block[block_id] = -1

    def check_integrity(self, first_blocks: Iterable[int]) -> None:
        """Raises AssertionError unless each slot is free, or of one of first_blocks: those that
        leases begin with."""
        used = [slot for slot in self.of_block if slot >= 0]
        with_slot = {block_id for block_id, slot in enumerate(self.of_block) if slot >= 0}
        faults = {
            "a state slot is in two states": len({*used, *self._free})
            != len(used) + len(self._free),
            "a state slot is lost": len(used) + len(self._free) != self.num_slots,
            "a state slot is of no sequence, or a sequence has none": with_slot
            != set(first_blocks),
        }
        found = [fault for fault, is_there in faults.items() if is_there]
        if found:
            raise AssertionError("; ".join(found))

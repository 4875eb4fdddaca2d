"""Layers with a state in place of KV (Mamba, gated delta rule, short convolutions).

A sequence has one record per such layer: the state after the last computed token. All its states
share the slot of its first block, which the lease holds while the sequence runs. The slot follows
the block to a ticket's writer, to the sender of a handoff, into a fork, and back to the pool. Every
step writes the states: of two leases that share the first block after a fork, the first to continue
copies block and slot (copy-on-write).

States cannot be rewound, and states after a prefix are not kept, so prefixes are not shared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import ClassVar, Final

from baton.types import BlockCounts, KvLayout
from engine.kv.groups.group import GroupAllocator, LayerGroup, SlotTable

STATE: Final = 3


class StateGroup(LayerGroup):
    """States as opaque bytes, never converted; layer_bytes per layer."""

    number: ClassVar[int] = STATE
    is_paged: ClassVar[bool] = False
    cannot_rewind: ClassVar[str] = "layers with a state, which cannot go back"

    @classmethod
    def of(cls, layout: KvLayout, rest: Sequence[int]) -> StateGroup | None:
        del rest
        layers = range(layout.num_state_layers)
        return cls(layers, layout.state_layer_bytes) if layers else None

    @classmethod
    def is_sound(cls, layout: KvLayout) -> bool:
        return bool(layout.num_state_layers) == bool(layout.state_layer_bytes)

    def kept_start(self, num_tokens: int) -> int:
        return max(0, num_tokens - 1)

    def arrived_from(
        self, starts: Sequence[int], ends: Sequence[int], first_token: int, end_token: int
    ) -> int | None:
        """See LayerGroup: exactly the record after the last token."""
        return first_token if (starts, ends) == ([end_token - 1], [end_token]) else None

    def allocator(self, table: SlotTable) -> StateSlots:
        return StateSlots(table)


class StateSlots(GroupAllocator):
    """State slots of one worker. Transfer threads also read `of_block`, for blocks that they
    own."""

    written_places: ClassVar[tuple[int, ...]] = (0,)
    num_at_start: ClassVar[int] = 1

    def counts(self) -> BlockCounts:
        """All zero: there is one slot per sequence that may run, so slots never run out."""
        return BlockCounts(0, 0, 0)

    def begin(self, block_ids: Sequence[int], places: range) -> set[int]:
        del places
        self.take(block_ids[0])
        return {0}

    def num_to_write(self, held: set[int], places: range, copied: Sequence[int]) -> int:
        del held, places
        return int(0 in copied)

    def on_copy(self, held: set[int], place: int, source: int, target: int) -> None:
        del held, source
        if place == 0:
            self.take(target)

    def on_freed(self, block_id: int) -> None:
        if self.of_block[block_id] >= 0:
            self._free_slot(block_id)

    def _faults(
        self,
        leases: Iterable[tuple[Sequence[int], set[int]]],
        whole: set[int],
        with_slot: Set[int],
    ) -> dict[str, bool]:
        del whole
        first_blocks = {block_ids[0] for block_ids, _ in leases}
        return {"a slot is of no sequence, or a sequence has none": with_slot != first_blocks}

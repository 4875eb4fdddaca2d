"""Layers that attend to the last `window` tokens alone.

KV before the window is neither kept nor sent. If all layers are windowed, sequences give back the
blocks themselves. Otherwise the blocks hold the KV of the other layers, and the KV of windowed
layers may lie apart, in slots: a sequence holds a block while it runs, and the block's slot while
the block is in its window, so there are fewer slots than blocks.

        take                    give_back, the block is not indexed as whole
free ─────────▶ held ──────────────────────────────────────────────▶ free
                 ▲  │ give_back, it is
            hold │  ▼
               cached ─── taken, least recently given back first ─▶ held by another block

The block of a cached slot is indexed with the KV of all layers; a block that lost its slot is
indexed without that of windowed layers. The block pool's thread changes slots; transfer threads
read `of_block` for blocks that they own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence, Set
from typing import ClassVar, Final

from baton.types import BlockCounts, KvLayout
from engine.kv.groups.group import GroupAllocator, LayerGroup, SlotTable

WINDOWED: Final = 2


def windows_of(windows: Sequence[int | None]) -> tuple[int, tuple[int, ...]]:
    """window and windowed_layers of KvLayout, from each layer's window in tokens, None for full
    attention."""
    windowed = tuple(layer for layer, window in enumerate(windows) if window)
    return max((window for window in windows if window), default=0), windowed


class WindowGroup(LayerGroup):
    """Keys and values of the last tokens. window: the longest among these layers, in tokens,
    including the new token."""

    number: ClassVar[int] = WINDOWED

    def __init__(self, layers: Sequence[int], layer_bytes: int, window: int) -> None:
        super().__init__(layers, layer_bytes)
        self.window = window

    @classmethod
    def of(cls, layout: KvLayout, rest: Sequence[int]) -> WindowGroup | None:
        layers = [layer for layer in rest if layer in layout.windowed_layers]
        return cls(layers, layout.token_layer_bytes, layout.window) if layers else None

    @classmethod
    def is_sound(cls, layout: KvLayout) -> bool:
        layers = layout.windowed_layers
        return bool(layout.window) == bool(layers) and all(n < layout.num_layers for n in layers)

    def kept_start(self, num_tokens: int) -> int:
        return max(0, num_tokens - self.window + 1)

    def max_slots(self, max_num_seqs: int, max_num_batched_tokens: int, block_size: int) -> int:
        """See LayerGroup: per sequence its window, counted from the last full block, and the block
        being written; plus the writes of two steps in flight.

        Short-term needs (windows of prefixes being sent or awaited) evict cached slots, or wait.
        """
        own = -(-(self.window - 1) // block_size) + 2
        return max_num_seqs * own + -(-2 * max_num_batched_tokens // block_size)

    def allocator(self, table: SlotTable) -> WindowSlots:
        return WindowSlots(table)


class WindowSlots(GroupAllocator):
    """Window slots of one worker."""

    slides: ClassVar[bool] = True

    def __init__(self, table: SlotTable) -> None:
        super().__init__(table)
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Blocks with unreferenced slots, least recently given back first."""
        self._references = [0] * len(self.of_block)
        """Leases per block's slot."""

    def counts(self) -> BlockCounts:
        free, cached = len(self._free), len(self._cached)
        return BlockCounts(free=free, cached=cached, leased=self.num_slots - free - cached)

    @property
    def num_available(self) -> int:
        """Free slots, and cached ones that can be evicted."""
        return len(self._free) + len(self._cached)

    # Leases

    def begin(self, block_ids: Sequence[int], places: range) -> set[int]:
        for place in places:
            self.hold(block_ids[place])
        return set(places)

    def num_to_write(self, held: set[int], places: range, copied: Sequence[int]) -> int:
        return sum(place not in held for place in places) + len(copied)

    def on_copy(self, held: set[int], place: int, source: int, target: int) -> None:
        if place not in held:
            return
        if self._references[source] == 1:
            self._move(source, target)
            self._index.set_partial(source)
        else:
            self.give_back(source)
            self.take(target)

    def on_write(self, held: set[int], block_ids: Sequence[int], places: range) -> None:
        for place in places:
            if place not in held:
                self.take(block_ids[place])
                held.add(place)

    def fork(self, held: set[int], block_ids: Sequence[int]) -> set[int]:
        places = {place for place in held if place < len(block_ids)}
        for place in places:
            self.hold(block_ids[place])
        return places

    def slide(self, held: set[int], block_ids: Sequence[int], first: int) -> None:
        gone = [place for place in held if place < first]
        for place in gone:
            self.give_back(block_ids[place])
        held.difference_update(gone)

    def release(self, held: set[int], block_ids: Sequence[int]) -> None:
        """See GroupAllocator. Last first, as blocks are released."""
        for place in sorted(held, reverse=True):
            self.give_back(block_ids[place])
        held.clear()

    # Slots

    def take(self, block_id: int) -> None:
        if not self._free:
            loser, _ = self._cached.popitem(last=False)
            self._free_slot(loser)
            self._index.set_partial(loser)
        super().take(block_id)
        self._references[block_id] = 1

    def hold(self, block_id: int) -> None:
        """Add a lease's reference to the block's slot."""
        self._cached.pop(block_id, None)
        self._references[block_id] += 1

    def give_back(self, block_id: int) -> None:
        """Drop a lease's reference to the block's slot; it stays cached if the block is indexed as
        whole."""
        self._references[block_id] -= 1
        if self._references[block_id]:
            return
        if self._index.is_whole(block_id):
            self._cached[block_id] = None
        else:
            self._free_slot(block_id)

    def on_evicted(self, block_id: int) -> None:
        if block_id in self._cached:
            del self._cached[block_id]
            self._free_slot(block_id)

    def _move(self, source: int, target: int) -> None:
        """Move the slot of block `source`, held by one lease, to block `target`, which has none."""
        self.of_block[target], self.of_block[source] = self.of_block[source], -1
        self._references[target], self._references[source] = 1, 0

    def _faults(
        self,
        leases: Iterable[tuple[Sequence[int], set[int]]],
        whole: set[int],
        with_slot: Set[int],
    ) -> dict[str, bool]:
        expected = [0] * len(self.of_block)
        for block_ids, held in leases:
            for place in held:
                expected[block_ids[place]] += 1
        with_owner = {block_id for block_id, count in enumerate(expected) if count}
        return {
            "references to slots differ from the leases": expected != self._references,
            "a slot is of no lease and not cached": with_slot != with_owner | self._cached.keys(),
            "a cached slot is of a lease": not with_owner.isdisjoint(self._cached),
            "a cached slot cannot be found": not self._cached.keys() <= whole,
            "a block without a slot is found as whole": not whole <= with_slot,
        }

"""KV blocks of a model that has windowed and full layers, in two pieces of memory: a block has the
KV of full layers, and a slot that of windowed ones, of a block in somebody's window."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from baton.engine.interface import HostOrdered, SlotTable
from baton.engine.packed_pool import PackedPart, PackedPool
from baton.engine.torch_kv_pool import TorchKvPool
from baton.types import KvLayout, KvRange


class GroupedKvPool(HostOrdered, PackedPool):
    """See baton.engine.interface.KvPool. full: the KV of full layers, by block; windowed: that of
    windowed layers, by slot; both number the layers that they have from 0 on.

    tensor, scales: see TorchKvPool, of full layers.
    """

    def __init__(
        self, layout: KvLayout, num_blocks: int, num_window_slots: int, device: torch.device
    ) -> None:
        """layout: of the whole model's KV. num_window_slots: at least 1."""
        super().__init__(layout, num_blocks)
        table = SlotTable.of_blocks(num_blocks, num_window_slots)
        self.slots, self._slot_of = table, table.of_block
        # The same memory.
        self._slots = np.frombuffer(table.of_block, dtype=np.int64)
        self.full = TorchKvPool(layout.layers_of_kind(windowed=False), num_blocks, device)
        self.windowed = TorchKvPool(layout.layers_of_kind(windowed=True), num_window_slots, device)
        self.tensor, self.scales = self.full.tensor, self.full.scales

    def window_table(self, block_table: Sequence[int], start: int, end: int) -> array[int]:
        """A block table as windowed layers have it, of a sequence whose tokens [start, end) are
        new: slots of the blocks that these attend to; what is said of others means nothing. A
        negative one: there is none."""
        size = self.layout.block_size
        first = max(0, start - self.layout.window + 1) // size
        blocks = np.array(block_table[first : -(-end // size)], dtype=np.int64)
        table = array("q", bytes(8 * first))
        table.frombytes(self._slots[blocks].tobytes())
        return table

    def pack_parts(
        self, block_ids: Sequence[int], piece: KvRange, parts: Sequence[PackedPart]
    ) -> None:
        """See PackedPool. Raises ValueError where a block has no slot."""
        for pool, ids, run, own in self._runs(block_ids, piece):
            pool.pack_parts(ids, run, [part[own] for part in parts])

    def unpack_parts(
        self, block_ids: Sequence[int], piece: KvRange, parts: Sequence[PackedPart]
    ) -> None:
        """See PackedPool. Raises ValueError where a block has no slot."""
        for pool, ids, run, own in list(self._runs(block_ids, piece)):
            pool.unpack_parts(ids, run, [part[own] for part in parts])

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See KvPool."""
        self.full.copy_blocks(sources, targets)
        slot_of = self._slot_of
        pairs = [
            (slot_of[source], slot_of[target])
            for source, target in zip(sources, targets, strict=True)
            if slot_of[source] >= 0
        ]
        if pairs:
            self.windowed.copy_blocks(*zip(*pairs, strict=True))

    def _runs(
        self, block_ids: Sequence[int], piece: KvRange
    ) -> Iterator[tuple[TorchKvPool, Sequence[int], KvRange, slice]]:
        """A piece's layers by where they lie: the pool, the blocks or slots that the tokens are in,
        the piece within these, and which layers of the piece it has."""
        size, num_tokens = self.layout.block_size, piece.num_tokens
        first = piece.first_token // size
        blocks = block_ids[first : -(-piece.end_token // size)]
        for is_windowed, number, run in self.layout.runs_of_kind(piece):
            pool, ids = (
                (self.windowed, self._slots_of(blocks)) if is_windowed else (self.full, blocks)
            )
            within = KvRange(piece.first_token - first * size, num_tokens, number, run.num_layers)
            at = run.first_layer - piece.first_layer
            yield pool, ids, within, slice(at, at + run.num_layers)

    def _slots_of(self, block_ids: Sequence[int]) -> list[int]:
        slots = [self._slot_of[block_id] for block_id in block_ids]
        if min(slots, default=0) < 0:
            raise ValueError("a block has no slot for the KV of windowed layers")
        return slots

"""KV blocks and states of sequences, of a model that has layers with a state in place of KV, or
beside it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.types import KvGroup, KvLayout, KvRange
from engine.kv.tensors.paged import TorchKvPool
from engine.kv.tensors.state_memory import StateMemory

#: Of an element, which is float32.
ELEMENT_BYTES = 4


class StatefulKvPool(TorchKvPool):
    """See engine.interface.KvPool; of a CPU's memory. KV is in blocks, and the states of a
    sequence in the slot of its first block."""

    def __init__(self, layout: KvLayout, num_blocks: int, num_state_slots: int) -> None:
        """layout: has_states."""
        super().__init__(layout, num_blocks, torch.device("cpu"))
        self._memory = StateMemory(layout, num_blocks, num_state_slots)
        self.state_slots = self._memory.slots
        # The same memory, [num_slots, STATES_PER_SLOT, num_state_layers, elements].
        self._states = torch.from_numpy(self._memory.data).view(torch.float32)

    def begin_step(
        self, block_table: Sequence[int], start: int
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Of a sequence whose new tokens begin at `start`: its states before them, and where those
        after them are to be written, see SequenceStates and StateMemory."""
        before, after = self._memory.begin_step(block_table, start)
        return None if before is None else self._states[before], self._states[after]

    def end_step(self, block_table: Sequence[int], start: int, end: int) -> None:
        """See StateMemory."""
        self._memory.end_step(block_table, start, end)

    def pack(self, block_ids: Sequence[int], piece: KvRange, out: memoryview) -> None:
        """See KvPool."""
        if piece.group is KvGroup.STATE:
            self._memory.pack(block_ids, piece, out)
        else:
            super().pack(block_ids, piece, out)

    def unpack(self, block_ids: Sequence[int], piece: KvRange, data: memoryview) -> None:
        """See KvPool."""
        if piece.group is KvGroup.STATE:
            self._memory.unpack(block_ids, piece, data)
        else:
            super().unpack(block_ids, piece, data)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See KvPool."""
        super().copy_blocks(sources, targets)
        self._memory.copy(sources, targets)

"""KV blocks and states of sequences, in host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.types import KvLayout
from engine.kv.groups.state import STATE
from engine.kv.tensors.paged import TorchKvPool
from engine.kv.tensors.state_memory import StateMemory

#: Bytes of a state's element, float32.
ELEMENT_BYTES = 4


class StatefulKvPool(TorchKvPool):
    """See engine.kv.interface.KvPool. KV is in blocks; a sequence's states are in the slot of its
    first block."""

    def __init__(self, layout: KvLayout, num_blocks: int, num_state_slots: int) -> None:
        """layout: with state layers."""
        self._memory = StateMemory(layout, num_blocks, num_state_slots)
        super().__init__(layout, num_blocks, torch.device("cpu"), records={STATE: self._memory})
        # Shares memory: [num_slots, STATES_PER_SLOT, num_state_layers, elements].
        self._states = torch.from_numpy(self._memory.data).view(torch.float32)

    def begin_step(
        self, block_table: Sequence[int], start: int
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """States of a sequence with new tokens from `start` on: those before them, and where to
        write those after them. See SequenceStates and StateMemory."""
        before, after = self._memory.begin_step(block_table, start)
        return None if before is None else self._states[before], self._states[after]

    def end_step(self, block_table: Sequence[int], start: int, end: int) -> None:
        """See StateMemory."""
        self._memory.end_step(block_table, start, end)

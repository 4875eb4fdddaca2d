"""KV blocks and states of sequences, of a model that has layers with a state in place of KV, or
beside it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from baton.engine.interface import SlotTable
from baton.engine.torch_kv_pool import TorchKvPool
from baton.types import KvGroup, KvLayout, KvRange

#: States that a slot holds: that after the last step, and that which the step before began with.
STATES_PER_SLOT = 2
#: Of an element, which is float32.
ELEMENT_BYTES = 4


class StatefulKvPool(TorchKvPool):
    """See baton.engine.interface.KvPool; of a CPU's memory. KV is in blocks, and the states of a
    sequence in the slot of its first block.

    A slot has two places, each with the number of tokens that its states are after. A step reads
    the one and writes the other, and what it has read stays until the step after it: a step whose
    result is thrown away changes nothing, and may be run again, as one may that writes KV.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, num_state_slots: int) -> None:
        """layout: has_states."""
        super().__init__(layout, num_blocks, torch.device("cpu"))
        table = SlotTable.of_blocks(num_blocks, num_state_slots)
        self.state_slots, self._slots_of_blocks = table, table.of_block
        shape = (num_state_slots, STATES_PER_SLOT, layout.num_state_layers)
        self._states = torch.zeros(*shape, layout.state_layer_bytes // ELEMENT_BYTES)
        self._num_tokens = np.full((num_state_slots, STATES_PER_SLOT), -1, dtype=np.int64)
        """That the states are after; -1 if they are none."""
        # By layers, [..., state_layer_bytes].
        self._state_bytes = self._states.view(torch.uint8).numpy()

    def begin_step(
        self, block_table: Sequence[int], start: int
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Of a sequence whose new tokens begin at `start`: its states before them, and where those
        after them are to be written, see SequenceStates. Until end_step it has none but those
        before. Raises ValueError if it has no slot, or those are not there."""
        slot = self._slot_of(block_table)
        if start == 0:
            self._num_tokens[slot] = -1
            return None, self._states[slot, 0]
        at = self._place_of(slot, start)
        self._num_tokens[slot, 1 - at] = -1
        return self._states[slot, at], self._states[slot, 1 - at]

    def end_step(self, block_table: Sequence[int], start: int, end: int) -> None:
        """The states after tokens [start, end) are written."""
        slot = self._slot_of(block_table)
        at = 0 if start == 0 else 1 - self._place_of(slot, start)
        self._num_tokens[slot, at] = end

    def pack(self, block_ids: Sequence[int], piece: KvRange, out: memoryview) -> None:
        """See KvPool."""
        if piece.group is not KvGroup.STATE:
            super().pack(block_ids, piece, out)
            return
        slot, layers = self._slot_of(block_ids), self._state_layers(piece, out)
        at = self._place_of(slot, piece.end_token)
        np.frombuffer(out, dtype=np.uint8)[:] = self._state_bytes[slot, at, layers].reshape(-1)

    def unpack(self, block_ids: Sequence[int], piece: KvRange, data: memoryview) -> None:
        """See KvPool. States that come are those of a sequence that begins here."""
        if piece.group is not KvGroup.STATE:
            super().unpack(block_ids, piece, data)
            return
        slot, layers = self._slot_of(block_ids), self._state_layers(piece, data)
        place = self._state_bytes[slot, 0, layers]
        place[...] = np.frombuffer(data, dtype=np.uint8).reshape(place.shape)
        self._num_tokens[slot] = (piece.end_token, -1)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See KvPool."""
        super().copy_blocks(sources, targets)
        slot_of = self._slots_of_blocks
        for source, target in zip(sources, targets, strict=True):
            if slot_of[source] >= 0 and slot_of[target] >= 0:
                self._states[slot_of[target]] = self._states[slot_of[source]]
                self._num_tokens[slot_of[target]] = self._num_tokens[slot_of[source]]

    def _slot_of(self, block_ids: Sequence[int]) -> int:
        slot = self._slots_of_blocks[block_ids[0]] if len(block_ids) else -1
        if slot < 0:
            raise ValueError("the sequence has no slot for its states")
        return slot

    def _place_of(self, slot: int, num_tokens: int) -> int:
        """Of the states after num_tokens tokens."""
        for at in range(STATES_PER_SLOT):
            if self._num_tokens[slot, at] == num_tokens:
                return at
        raise ValueError(f"the states after {num_tokens} tokens are not here")

    def _state_layers(self, piece: KvRange, data: memoryview) -> slice:
        layout = self.layout
        if (
            piece.num_tokens != 1
            or min(piece.first_token, piece.first_layer) < 0
            or piece.end_layer > layout.num_state_layers
        ):
            raise ValueError(f"{piece} is no state of {layout.num_state_layers} layers")
        if data.nbytes != layout.num_bytes(piece):
            raise ValueError(f"{data.nbytes} bytes do not hold {piece}")
        return slice(piece.first_layer, piece.end_layer)

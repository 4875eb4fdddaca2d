"""Memory of sequences' states, by slot, for layers with a state: see engine.kv.groups.state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton.types import KvLayout
from engine.kv.groups.group import SlotTable
from engine.kv.groups.state import STATE
from engine.kv.layout import groups_of
from engine.kv.range import KvRange

#: States per slot: after the last step, and before it.
STATES_PER_SLOT = 2


class StatePlace(NamedTuple):
    """Location of the states of all layers of a sequence: SlotStates.data[place]."""

    slot: int
    at: int

    @property
    def number(self) -> int:
        """Its number among the places of all slots."""
        return self.slot * STATES_PER_SLOT + self.at


class SlotStates(ABC):
    """The states of all slots. Subclasses have the memory.

    A slot has two places, each with the number of tokens that its states follow. A step reads one
    place and writes the other, so its input stays until the next step: a discarded step has no
    effect and may run again.

    data: array or tensor, uint8 [num_slots, STATES_PER_SLOT, num_state_layers, state_layer_bytes],
    read and written in place by steps.
    """

    data: Any

    def __init__(self, layout: KvLayout, num_blocks: int, num_slots: int) -> None:
        """layout: with the state layers that lie here. num_blocks: of the pool next to it."""
        self.slots = SlotTable.empty(num_blocks, num_slots)
        self.layout = layout
        self._num_tokens = np.full((num_slots, STATES_PER_SLOT), -1, dtype=np.int64)
        """Number of tokens that the states follow; -1 if there are none."""

    @property
    def padding(self) -> tuple[int, ...]:
        """Numbers of two places of no slot, for padding sequences of recorded steps: one that they
        read, of zeros, and one that they write. Empty where no steps are recorded."""
        return ()

    @abstractmethod
    def read(self, place: StatePlace, layers: slice, out: memoryview) -> None:
        """Copy the states of some layers to `out`, in the calling thread."""

    @abstractmethod
    def write(self, place: StatePlace, layers: slice, data: memoryview) -> None:
        """Inverse of read."""

    def begin_step(
        self, block_table: Sequence[int], start: int
    ) -> tuple[StatePlace | None, StatePlace]:
        """Places of a sequence with new tokens from `start` on: of the states before them (None at
        its beginning), and of those after them, to be written. Until end_step only the former are
        valid. Raises ValueError if the sequence has no slot, or its states are missing."""
        slot = self._slot_of(block_table)
        if start == 0:
            self._num_tokens[slot] = -1
            return None, StatePlace(slot, 0)
        at = self._place_of(slot, start)
        self._num_tokens[slot, 1 - at] = -1
        return StatePlace(slot, at), StatePlace(slot, 1 - at)

    def follow_step(self, before: int, after: int, end: int) -> None:
        """In the place of begin_step and end_step on a rank that gets rank 0's places: a step is
        about to write the states after tokens [..., end). before, after: see SequenceStates of
        StepStates; numbers of places, `before` negative at a sequence's beginning."""
        slot, at = divmod(after, STATES_PER_SLOT)
        if before < 0:
            self._num_tokens[slot] = -1
        self._num_tokens[slot, at] = end

    def end_step(self, block_table: Sequence[int], start: int, end: int) -> None:
        """Mark the states after tokens [start, end) as written."""
        slot = self._slot_of(block_table)
        at = 0 if start == 0 else 1 - self._place_of(slot, start)
        self._num_tokens[slot, at] = end

    def pack(self, block_ids: Sequence[int], piece: KvRange, out: memoryview) -> None:
        """See KvPool."""
        slot, layers = self._slot_of(block_ids), self._layers(piece, out)
        self.read(StatePlace(slot, self._place_of(slot, piece.end_token)), layers, out)

    def unpack(self, block_ids: Sequence[int], piece: KvRange, data: memoryview) -> None:
        """See KvPool. Received states start a sequence here."""
        slot, layers = self._slot_of(block_ids), self._layers(piece, data)
        self.write(StatePlace(slot, 0), layers, data)
        self._num_tokens[slot] = (piece.end_token, -1)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See KvPool.copy_blocks."""
        slot_of = self.slots.of_block
        pairs = [
            (slot_of[source], slot_of[target])
            for source, target in zip(sources, targets, strict=True)
            if slot_of[source] >= 0 and slot_of[target] >= 0
        ]
        if pairs:
            self.copy_slots(*zip(*pairs, strict=True))

    def copy_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots, sources[i] to targets[i], in order."""
        for source, target in zip(sources, targets, strict=True):
            self.data[target] = self.data[source]
            self._num_tokens[target] = self._num_tokens[source]

    def _slot_of(self, block_ids: Sequence[int]) -> int:
        slot = self.slots.of_block[block_ids[0]] if len(block_ids) else -1
        if slot < 0:
            raise ValueError("the sequence has no slot for its states")
        return slot

    def _place_of(self, slot: int, num_tokens: int) -> int:
        """Index of the states after num_tokens tokens; of any, while slots are shared."""
        if self.slots.is_shared:
            return 0
        for at in range(STATES_PER_SLOT):
            if self._num_tokens[slot, at] == num_tokens:
                return at
        raise ValueError(f"the states after {num_tokens} tokens are not here")

    def _layers(self, piece: KvRange, data: memoryview) -> slice:
        layout = self.layout
        if (
            piece.num_tokens != 1
            or min(piece.first_token, piece.first_layer) < 0
            or piece.end_layer > layout.num_state_layers
        ):
            raise ValueError(f"{piece} is no state of {layout.num_state_layers} layers")
        if data.nbytes != piece.num_bytes(layout.state_layer_bytes):
            raise ValueError(f"{data.nbytes} bytes do not hold {piece}")
        return slice(piece.first_layer, piece.end_layer)


class StateMemory(SlotStates):
    """The states of all slots, in host memory."""

    data: NDArray[np.uint8]

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        num_slots: int,
        memory: NDArray[np.uint8] | None = None,
    ) -> None:
        """memory: state_bytes of `num_slots`; allocated if not given. Others: see SlotStates."""
        super().__init__(layout, num_blocks, num_slots)
        shape = state_shape(layout, num_slots)
        self.data = np.zeros(shape, np.uint8) if memory is None else memory.reshape(shape)

    def read(self, place: StatePlace, layers: slice, out: memoryview) -> None:
        np.frombuffer(out, dtype=np.uint8)[:] = self.data[place][layers].reshape(-1)

    def write(self, place: StatePlace, layers: slice, data: memoryview) -> None:
        target = self.data[place][layers]
        target[...] = np.frombuffer(data, dtype=np.uint8).reshape(target.shape)


def state_shape(layout: KvLayout, num_slots: int) -> tuple[int, int, int, int]:
    """Shape of SlotStates.data."""
    return num_slots, STATES_PER_SLOT, layout.num_state_layers, layout.state_layer_bytes


def state_bytes(layout: KvLayout, num_slots: int) -> int:
    """Memory of the states of so many slots."""
    return num_slots * STATES_PER_SLOT * groups_of(layout).record_bytes


def state_records(
    layout: KvLayout, num_blocks: int, num_slots: int, memory: NDArray[np.uint8] | None = None
) -> Mapping[int, StateMemory]:
    """Records of a pool (see PackedPool): the states, if the layout has any. See StateMemory."""
    if not layout.num_state_layers:
        return {}
    return {STATE: StateMemory(layout, num_blocks, num_slots, memory)}

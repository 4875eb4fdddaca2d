"""Sequences' states in a device's memory: see engine.kv.tensors.state_memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from baton.types import KvLayout
from engine.kv.groups.state import STATE
from engine.kv.tensors.copy_order import CopyOrder
from engine.kv.tensors.pinned_staging import PinnedStagingBuffer
from engine.kv.tensors.state_memory import (
    SlotStates,
    StatePlace,
    state_bytes,
    state_records,
    state_shape,
)

#: Slots in a device's memory that no sequence has, see SlotStates.padding.
_NUM_PADDING_SLOTS = 1


class DeviceStates(SlotStates):
    """The states of all slots on a device. Reads and writes follow the marks of `order`, and are
    complete on return; slots are copied in the engine's thread, in order with its kernels."""

    data: torch.Tensor

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        num_slots: int,
        device: torch.device,
        order: CopyOrder,
    ) -> None:
        """order: of the pool next to it. Others: see SlotStates."""
        super().__init__(layout, num_blocks, num_slots)
        shape = state_shape(layout, num_slots + _NUM_PADDING_SLOTS)
        self.data = torch.zeros(shape, dtype=torch.uint8, device=device)
        self._order, self._pinned = order, PinnedStagingBuffer(device)

    @property
    def padding(self) -> tuple[int, int]:
        """See SlotStates: the places of the slot behind all others."""
        slot = self.slots.num_slots
        return StatePlace(slot, 0).number, StatePlace(slot, 1).number

    def read(self, place: StatePlace, layers: slice, out: memoryview) -> None:
        with self._order.copying():
            self._pinned.to_host(self.data[place][layers].view(-1), out)

    def write(self, place: StatePlace, layers: slice, data: memoryview) -> None:
        with self._order.copying():
            self._pinned.to_device(data, self.data[place][layers].view(-1))


def record_bytes_on(device: torch.device, layout: KvLayout, num_slots: int) -> int:
    """Bytes of the states of records_on."""
    return state_bytes(layout, num_slots + _NUM_PADDING_SLOTS * (device.type != "cpu"))


def records_on(
    device: torch.device, layout: KvLayout, num_blocks: int, num_slots: int, order: CopyOrder
) -> Mapping[int, SlotStates]:
    """Records of a pool on a device, see state_records. order: of the pool."""
    if device.type == "cpu":
        return state_records(layout, num_blocks, num_slots)
    if not layout.num_state_layers:
        return {}
    return {STATE: DeviceStates(layout, num_blocks, num_slots, device, order)}

"""States in a device's memory are copied in the pool's order, and are those that were written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from baton.types import KvLayout
from engine.kv.groups.state import STATE
from engine.kv.layout import groups_of
from engine.kv.range import KvRange
from engine.kv.tensors.copy_order import HostOrder
from engine.kv.tensors.device_states import DeviceStates, records_on
from engine.kv.tensors.paged import TorchKvPool

CPU = torch.device("cpu")
LAYOUT = KvLayout(*("m", 2, 1, 4, "float32", 4), num_state_layers=3, state_layer_bytes=24)


class NotedOrder(HostOrder):
    """Counts copies, and what they follow."""

    def __init__(self) -> None:
        self.events: list[object] = []

    def follow(self, mark: object) -> None:
        self.events.append(mark)

    @contextmanager
    def copying(self) -> Iterator[None]:
        self.events.append("begin")
        yield
        self.events.append("end")


def record(num_tokens: int, first_layer: int = 0, num_layers: int = 3) -> KvRange:
    return KvRange(num_tokens - 1, 1, first_layer, num_layers, STATE)


def test_states_are_copied_in_the_order_of_the_pool() -> None:
    order = NotedOrder()
    states = DeviceStates(LAYOUT, 6, 2, CPU, order)
    pool = TorchKvPool(LAYOUT, 6, CPU, records={STATE: states}, order=order)
    states.slots.of_block[4], states.slots.of_block[2] = 1, 0
    sent = bytes(range(groups_of(LAYOUT).record_bytes))
    pool.follow("a mark")
    pool.unpack((4, 1), record(5), memoryview(sent))
    found = bytearray(2 * LAYOUT.state_layer_bytes)
    pool.pack((4,), record(5, 1, 2), memoryview(found))
    assert found == sent[24:]
    assert order.events == ["a mark", "begin", "end", "begin", "end"]
    pool.copy_blocks((4,), (2,))
    pool.pack((2,), record(5, 1, 2), memoryview(found))
    assert found == sent[24:]
    with pytest.raises(ValueError, match="after 6 tokens"):
        pool.pack((4,), record(6, 1, 2), memoryview(found))


def test_a_step_writes_the_place_that_it_does_not_read() -> None:
    states = DeviceStates(LAYOUT, 6, 2, CPU, HostOrder())
    states.slots.of_block[0] = 1
    before, after = states.begin_step((0,), 0)
    assert before is None
    states.data[after].fill_(7)
    states.end_step((0,), 0, 3)
    before, after = states.begin_step((0,), 3)
    assert before is not None
    assert before.number != after.number
    assert (states.data[before] == 7).all()


def test_a_pool_without_states_has_none() -> None:
    plain = KvLayout("m", 2, 1, 4, "float32", 4)
    assert not records_on(torch.device("meta"), plain, 6, 2, HostOrder())
    found = records_on(torch.device("meta"), LAYOUT, 6, 2, HostOrder())[STATE]
    assert found.data.device.type == "meta"

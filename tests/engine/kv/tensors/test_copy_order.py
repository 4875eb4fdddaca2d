"""What a CUDA device's order asks of streams and events, on stand-ins for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from baton.types import KvLayout
from engine.kv.range import KvRange
from engine.kv.tensors.copy_order import CopyOrder, HostOrder, StreamOrder, copy_order
from engine.kv.tensors.device_copy import PagedDeviceCopy
from engine.kv.tensors.paged import TorchKvPool
from engine.kv.tensors.pinned_staging import PinnedStagingBuffer
from kv_transfer.wire_format import wire_format
from tests.support.device_double import DoubleMemory
from tests.support.fake_streams import FakeStream, stand_ins

DEVICE = torch.device("cuda:0")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeStream:
    """The stream that is current outside of any context."""
    return stand_ins(monkeypatch)


def own_calls(engine: FakeStream) -> list[object]:
    """Calls of the current stream."""
    stream = torch.cuda.current_stream(DEVICE)
    assert isinstance(stream, FakeStream)
    assert stream is not engine
    return stream.calls


def test_a_copy_waits_for_what_the_engine_had_started_at_its_mark(engine: FakeStream) -> None:
    order = StreamOrder(DEVICE)
    engine.calls.append("a kernel that writes the blocks")
    mark = order.mark()
    engine.calls.append("a kernel of another's blocks")
    order.follow(mark)
    with order.copying():
        calls = own_calls(engine)
        assert calls == [("event", 2)]
    assert calls[-1] == "synchronize"
    assert engine.calls[1] == "record"


def test_copies_without_a_mark_wait_for_nothing(engine: FakeStream) -> None:
    order = StreamOrder(DEVICE)
    order.follow(None)
    with order.copying():
        calls = own_calls(engine)
        assert not calls
    assert calls == ["synchronize"]


def test_the_device_is_asked_on_the_threads_own_stream(engine: FakeStream) -> None:
    order = StreamOrder(DEVICE)
    order.synchronize()
    with order.copying():
        calls = own_calls(engine)
    assert calls == ["synchronize", "synchronize"]
    assert not engine.calls


def test_a_copy_that_fails_is_over_all_the_same(engine: FakeStream) -> None:
    order = StreamOrder(DEVICE)
    seen: list[list[object]] = []

    def fail() -> None:
        with order.copying():
            seen.append(own_calls(engine))
            raise ValueError("no such block")

    with pytest.raises(ValueError, match="no such block"):
        fail()
    assert seen[0][-1] == "synchronize"


def test_each_thread_has_one_stream_of_its_own(engine: FakeStream) -> None:
    order = StreamOrder(DEVICE)
    streams: list[list[object]] = []

    def copy_twice() -> None:
        for _ in range(2):
            with order.copying():
                streams.append(own_calls(engine))

    copy_twice()
    thread = threading.Thread(target=copy_twice)
    thread.start()
    thread.join()
    assert streams[0] is streams[1]
    assert streams[2] is streams[3]
    assert streams[0] is not streams[2]


def test_the_cpu_has_no_order_to_keep() -> None:
    assert isinstance(copy_order(torch.device("cpu")), HostOrder)
    assert HostOrder().mark() is None


class CachingAllocator:
    """As torch's: freed memory is given out again to the stream that it was freed on, at once,
    since what is queued there runs before the new owner's kernels. One block was
    freed on the engine's stream, where a kernel that writes it is still queued."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: FakeStream, num_bytes: int) -> None:
        self._engine, self._empty = engine, torch.empty
        self.freed = self._empty(num_bytes, dtype=torch.uint8)
        monkeypatch.setattr(torch, "empty", self.empty)

    def empty(self, *size: Any, **options: Any) -> torch.Tensor:
        if size == (len(self.freed),) and torch.cuda.current_stream(DEVICE) is self._engine:
            return self.freed
        return self._empty(*size, **options)

    def run_queued(self) -> None:
        """The engine's stream comes to a kernel that was queued before the block was freed."""
        self.freed.fill_(0xA5)


PIECE = KvRange(0, 8, 0, 2)


def copy_of(order: CopyOrder) -> tuple[TorchKvPool, PagedDeviceCopy]:
    pool = TorchKvPool(KvLayout("m", 2, 2, 8, "float32", 4), 2, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    pool._blocks.copy_(torch.randint(0, 256, pool._blocks.shape, generator=generator))
    return pool, PagedDeviceCopy(pool.layout, pool._blocks, order, DoubleMemory())


@pytest.mark.parametrize("num_before", [0, 4], ids=["first use", "growth"])
def test_no_kernel_of_the_engine_writes_what_a_thread_copies_through(
    engine: FakeStream, monkeypatch: pytest.MonkeyPatch, num_before: int
) -> None:
    """Memory that the engine freed may still be written by kernels of its stream, which no copy
    waits for: a thread's staging memory is of the stream that copies."""
    source, copy = copy_of(StreamOrder(DEVICE))
    wire = wire_format("float32", source.layout)
    wanted = bytearray(wire.num_bytes(PIECE))
    copy_of(HostOrder())[1].pack_to_host((0, 1), PIECE, wire, memoryview(wanted))
    if num_before:
        small = KvRange(0, num_before, 0, 2)
        room = memoryview(bytearray(wire.num_bytes(small)))
        copy.pack_to_host((0,), small, wire, room)
    allocator = CachingAllocator(monkeypatch, engine, len(wanted))
    to_host, to_device = PinnedStagingBuffer.to_host, PinnedStagingBuffer.to_device

    def after_a_kernel(method: Callable[..., None]) -> Callable[..., None]:
        def late(buffer: PinnedStagingBuffer, *copied: Any) -> None:
            if method is to_host:
                allocator.run_queued()
            method(buffer, *copied)
            allocator.run_queued()

        return late

    monkeypatch.setattr(PinnedStagingBuffer, "to_host", after_a_kernel(to_host))
    monkeypatch.setattr(PinnedStagingBuffer, "to_device", after_a_kernel(to_device))
    sent = bytearray(len(wanted))
    copy.pack_to_host((0, 1), PIECE, wire, memoryview(sent))
    assert sent == wanted
    target, back = copy_of(StreamOrder(DEVICE))
    target._blocks.zero_()
    back.unpack_from_host((0, 1), PIECE, wire, memoryview(wanted))
    assert torch.equal(target._blocks, source._blocks)


def test_payloads_are_put_and_taken_on_the_threads_own_stream(
    engine: FakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, copy = copy_of(StreamOrder(DEVICE))
    streams: list[list[object]] = []
    for name in ("to_host", "to_device"):
        monkeypatch.setattr(PinnedStagingBuffer, name, lambda *_: streams.append(own_calls(engine)))
    data, payload = memoryview(bytearray(8)), torch.zeros(8, dtype=torch.uint8)
    copy.put(data, payload, 1)
    copy.take(payload, data, 1)
    assert len(streams) == 2
    assert [calls[-1] for calls in streams] == ["synchronize", "synchronize"]
    assert not engine.calls

"""What a CUDA device's order asks of streams and events, on stand-ins for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from engine.kv.tensors.copy_order import HostOrder, StreamOrder, copy_order

DEVICE = torch.device("cuda:0")


class FakeStream:
    """Notes what it is asked for. An event is the number of calls that its stream had seen."""

    def __init__(self, _device: object = None) -> None:
        self.calls: list[object] = []

    def record_event(self) -> int:
        self.calls.append("record")
        return len(self.calls)

    def wait_event(self, event: int) -> None:
        self.calls.append(("event", event))

    def synchronize(self) -> None:
        self.calls.append("synchronize")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeStream:
    """The stream that is current outside of any context."""
    return stand_ins(monkeypatch)


def stand_ins(monkeypatch: pytest.MonkeyPatch) -> FakeStream:
    """For torch's streams; the one that is current outside of any context."""
    current, first = threading.local(), FakeStream()

    @contextmanager
    def within(stream: FakeStream) -> Iterator[None]:
        before, current.stream = getattr(current, "stream", first), stream
        yield
        current.stream = before

    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda _device: getattr(current, "stream", first)
    )
    return first


def own_calls(engine: FakeStream) -> list[object]:
    """Of the stream that is current now."""
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

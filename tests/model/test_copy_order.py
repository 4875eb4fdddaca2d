"""What a CUDA device's order asks of streams and events, on stand-ins for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.copy_order import HostOrder, StreamOrder, copy_order

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

    def wait_stream(self, stream: FakeStream) -> None:
        self.calls.append(("stream", stream))

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


def event_waited_for(engine: FakeStream, order: StreamOrder, end_layer: int) -> object:
    with order.reading(end_layer):
        calls = own_calls(engine)
        ((kind, event),) = calls
    assert kind == "event"
    assert calls[-1] == "synchronize"
    calls.clear()
    return event


def test_reading_waits_for_the_last_step_alone(engine: FakeStream) -> None:
    order = StreamOrder(DEVICE)
    order.wrote()
    order.wrote()
    engine.calls.append("a kernel that nobody knows of")
    assert event_waited_for(engine, order, 4) == 3


def test_layers_are_read_while_later_ones_are_computed(engine: FakeStream) -> None:
    order = StreamOrder(DEVICE)
    order.wrote(2)
    order.wrote(4)
    assert [event_waited_for(engine, order, end) for end in (1, 2, 3, 4)] == [2, 2, 3, 3]
    order.wrote()
    # As late as a copy may begin: what its step marked still is enough.
    assert [event_waited_for(engine, order, end) for end in (1, 2, 3, 4)] == [2, 2, 3, 3]


def test_a_step_without_marks_outdoes_those_before(engine: FakeStream) -> None:
    order = StreamOrder(DEVICE)
    order.wrote(2)
    order.wrote(4)
    order.wrote()
    order.wrote()
    assert [event_waited_for(engine, order, end) for end in (2, 4)] == [5, 5]


@given(st.lists(st.lists(st.sampled_from([2, 4]), max_size=2, unique=True).map(sorted), max_size=5))
def test_no_copy_overtakes_what_was_reported_of_its_layers(steps: list[list[int]]) -> None:
    """steps: the marks of each, before its end."""
    with pytest.MonkeyPatch.context() as patch:
        engine = stand_ins(patch)
        order, written = StreamOrder(DEVICE), {1: 0, 2: 0, 3: 0, 4: 0}
        for marks in steps:
            engine.calls.append("the step's kernels")
            first = 1
            for end in marks:
                order.wrote(end)
                written |= dict.fromkeys(range(first, end + 1), len(engine.calls))
                first = end + 1
                check(engine, order, written)
            order.wrote()
            written |= dict.fromkeys(range(first, 5), len(engine.calls))
            check(engine, order, written)


def check(engine: FakeStream, order: StreamOrder, written: Mapping[int, int]) -> None:
    """written: by layer, counted from 1, the event after which it is there."""
    for end_layer, event in written.items():
        assert int(str(event_waited_for(engine, order, end_layer))) >= event


def test_writing_waits_for_all_that_was_started(engine: FakeStream) -> None:
    order = StreamOrder(DEVICE)
    with order.writing():
        calls = own_calls(engine)
        assert calls == [("stream", engine)]
    assert calls[-1] == "synchronize"


def test_copies_apart_wait_for_nothing(engine: FakeStream) -> None:
    order = StreamOrder(DEVICE)
    with order.apart():
        calls = own_calls(engine)
        assert not calls
    assert calls == ["synchronize"]


def test_a_copy_that_fails_is_over_all_the_same(engine: FakeStream) -> None:
    order = StreamOrder(DEVICE)
    seen: list[list[object]] = []

    def fail() -> None:
        with order.reading(1):
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
            with order.apart():
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

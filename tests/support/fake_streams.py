"""Stand-ins for torch's streams of a CUDA device, which note what they are asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


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

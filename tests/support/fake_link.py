"""A gateway's stream to a fake worker: in order both ways, with a delay of its own for each
message."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from baton.commands import Abort, SequenceCommand
from baton.events import Failed, SequenceEvent, is_last
from baton.types import KvSource, SequenceSpec
from gateway.links.worker_link import Sink


class Commanded(Protocol):
    """The worker at the other end."""

    def on_open(
        self, handle: int, spec: SequenceSpec, source: KvSource, num_handles: int, send_to: bytes
    ) -> None: ...

    def on_command(self, handle: int, command: SequenceCommand) -> None: ...


class _Pipe:
    """Calls in the order they were put in, each after a delay."""

    def __init__(self, latency: Callable[[], float]) -> None:
        self._latency = latency
        self._loop = asyncio.get_running_loop()
        self._calls: deque[Callable[[], None]] = deque()
        self.is_cut = False

    def put(self, call: Callable[..., None], *args: Any) -> None:
        self._calls.append(lambda: call(*args))
        delay_s = self._latency()
        if delay_s:
            self._loop.call_later(delay_s, self._next)
        else:
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        call = self._calls.popleft()
        if not self.is_cut:
            call()


class FakeLink:
    """Implements gateway.links.worker_link.WorkerLink. What a test wants to know is counted."""

    def __init__(
        self, worker: Commanded, latency: Callable[[], float], last_handle: int = 0
    ) -> None:
        """last_handle: the next one is the first to be given."""
        self.specs: list[SequenceSpec] = []
        """All that were ever opened here, in order."""
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._there, self._back = _Pipe(latency), _Pipe(latency)
        self._sinks: dict[int, Sink] = {}
        self._last_handle = last_handle
        self._is_lost = False

    def open(
        self, spec: SequenceSpec, source: KvSource, sinks: Sequence[Sink], send_to: bytes = b""
    ) -> int:
        first = self._last_handle + 1
        self._last_handle += len(sinks)
        self.specs.append(spec)
        self._sinks.update(enumerate(sinks, start=first))
        if self._is_lost:
            self._loop.call_soon(self._report_loss)
        self._there.put(self._worker.on_open, first, spec, source, len(sinks), send_to)
        return first

    def send(self, handle: int, command: SequenceCommand) -> None:
        if not isinstance(command, Abort) or self._sinks.pop(handle, None) is not None:
            self._there.put(self._worker.on_command, handle, command)

    def emit(self, handle: int, event: SequenceEvent) -> None:
        """The worker reports something."""
        self._back.put(self._deliver, handle, event)

    def lose(self) -> None:
        """The connection breaks: what is under way is lost, and the gateway sees it."""
        self._is_lost = True
        self._there.is_cut = self._back.is_cut = True
        self._loop.call_soon(self._report_loss)

    def _deliver(self, handle: int, event: SequenceEvent) -> None:
        sink = self._sinks.get(handle)
        if sink is None:
            return
        if is_last(event):
            del self._sinks[handle]
        sink(event)

    def _report_loss(self) -> None:
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink(Failed("WORKER_LOST", "the connection broke", is_retriable=True))

"""A worker that does nothing by itself: commands are recorded, and the test says what it
reports."""

from __future__ import annotations

from collections.abc import Sequence

from baton.commands import Abort, HandOff, Pause, Resume, SequenceCommand
from baton.events import SequenceEvent, is_last
from baton.types import KvSource, SequenceSpec
from gateway.links.worker_link import Sink


class StubLink:
    """Implements gateway.links.worker_link.WorkerLink."""

    def __init__(self) -> None:
        self.commands: list[tuple[object, ...]] = []
        self.specs: list[SequenceSpec] = []
        self._sinks: dict[int, Sink] = {}
        self._last_handle = 0

    @property
    def open_handles(self) -> set[int]:
        """Handles that were neither ended nor aborted."""
        return set(self._sinks)

    def open(
        self, spec: SequenceSpec, source: KvSource, sinks: Sequence[Sink], send_to: bytes = b""
    ) -> int:
        first = self._last_handle + 1
        self._last_handle += len(sinks)
        self._sinks.update(enumerate(sinks, start=first))
        self.specs.append(spec)
        self.commands.append(("open", source, send_to) if send_to else ("open", source))
        return first

    def send(self, handle: int, command: SequenceCommand) -> None:
        match command:
            case Abort() if self._sinks.pop(handle, None) is not None:
                self.commands.append(("abort", handle))
            case Pause():
                self.commands.append(("pause", handle))
            case HandOff(ticket):
                self.commands.append(("hand_off", handle, ticket))
            case Resume():
                self.commands.append(("resume", handle))

    def emit(self, event: SequenceEvent, handle: int = 1) -> None:
        """What the worker reports; nothing if nobody listens any more."""
        sink = self._sinks.get(handle)
        if sink is None:
            return
        if is_last(event):
            del self._sinks[handle]
        sink(event)

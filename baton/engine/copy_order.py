"""In which order an engine's kernels and the copies of other threads touch the blocks of a pool."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch


class CopyOrder(Protocol):
    """`wrote` is called in the engine's thread, all else in any. What is started in a context is
    over at its end."""

    def wrote(self, end_layer: int | None = None) -> None:
        """The engine's thread has started all that writes the layers before end_layer of the step
        under way, if one is given; else all of it, and the step is over."""
        ...

    def reading(self, end_layer: int) -> AbstractContextManager[None]:
        """For copies out of blocks, of layers before end_layer: they see what was written of these
        before the last call of `wrote` that was about them."""
        ...

    def writing(self) -> AbstractContextManager[None]:
        """For copies into blocks, whose owner may have been another a moment ago: nothing that the
        engine has started so far reads or writes them afterwards."""
        ...

    def apart(self) -> AbstractContextManager[None]:
        """For copies that touch no block."""
        ...


class HostOrder:
    """See CopyOrder. Of the CPU: what is called has happened when the call returns."""

    def wrote(self, end_layer: int | None = None) -> None:
        """See CopyOrder."""

    def reading(self, end_layer: int) -> AbstractContextManager[None]:  # noqa: ARG002
        """See CopyOrder."""
        return nullcontext()

    def writing(self) -> AbstractContextManager[None]:
        """See CopyOrder."""
        return nullcontext()

    def apart(self) -> AbstractContextManager[None]:
        """See CopyOrder."""
        return nullcontext()


class StreamOrder:
    """See CopyOrder. Of a CUDA device: each thread copies on a stream of its own, beside the
    engine's kernels, and waits there for those that it must not overtake.

    A call of a kernel returns before the kernel has run, so that `wrote` marks a place in the
    engine's stream: an event. A step's first layers are copied while its last ones are computed.
    """

    def __init__(self, device: torch.device) -> None:
        """The engine's stream is the one that is current in the calling thread."""
        self._device = device
        self._own = threading.local()
        self._engine = torch.cuda.current_stream(device)
        self._all = self._engine.record_event()
        """After all steps that are over."""
        self._by_end: Mapping[int, torch.Event] = {}
        """By end_layer, in the step under way or the last one that reported layers."""
        self._of_step: frozenset[int] = frozenset()
        """Those of the step under way."""

    def wrote(self, end_layer: int | None = None) -> None:
        """See CopyOrder."""
        self._engine = torch.cuda.current_stream(self._device)
        event = self._engine.record_event()
        kept = {
            end: mark
            for end, mark in self._by_end.items()
            # Earlier steps' marks hold for layers that this one has not come to.
            if end in self._of_step or not (end_layer is None or end < end_layer)
        }
        if end_layer is None:
            # Before marks are dropped: who finds none takes this one.
            self._all, self._by_end, self._of_step = event, kept, frozenset()
        else:
            self._by_end = {**kept, end_layer: event}
            self._of_step |= {end_layer}

    @contextmanager
    def reading(self, end_layer: int) -> Iterator[None]:
        """See CopyOrder."""
        marks = self._by_end
        end = min((end for end in marks if end >= end_layer), default=None)
        mark = self._all if end is None else marks[end]
        with self.apart():
            torch.cuda.current_stream(self._device).wait_event(mark)
            yield

    @contextmanager
    def writing(self) -> Iterator[None]:
        """See CopyOrder."""
        with self.apart():
            torch.cuda.current_stream(self._device).wait_stream(self._engine)
            yield

    @contextmanager
    def apart(self) -> Iterator[None]:
        """See CopyOrder. The end holds no GIL while it waits."""
        stream = self._stream()
        with torch.cuda.stream(stream):
            try:
                yield
            finally:
                stream.synchronize()

    def _stream(self) -> torch.cuda.Stream:
        """The calling thread's own."""
        if not hasattr(self._own, "stream"):
            self._own.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream: torch.cuda.Stream = self._own.stream
        return stream


def copy_order(device: torch.device) -> CopyOrder:
    """Of a pool on `device`."""
    return StreamOrder(device) if device.type == "cuda" else HostOrder()

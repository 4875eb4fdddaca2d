"""In which order an engine's kernels and the copies of other threads touch the blocks of a pool."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch


class CopyOrder(Protocol):
    """`wrote` is called in the engine's thread, all else in any. What is started in a context is
    over at its end."""

    def wrote(self) -> None:
        """The engine's thread has started all that writes what it reports from here on."""
        ...

    def reading(self) -> AbstractContextManager[None]:
        """For copies out of blocks: they see what was written before the last call of `wrote`."""
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

    def wrote(self) -> None:
        """See CopyOrder."""

    def reading(self) -> AbstractContextManager[None]:
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
    engine's stream: an event.
    """

    def __init__(self, device: torch.device) -> None:
        """The engine's stream is the one that is current in the calling thread."""
        self._device = device
        self._own = threading.local()
        self._engine = torch.cuda.current_stream(device)
        self._written = self._engine.record_event()

    def wrote(self) -> None:
        """See CopyOrder."""
        self._engine = torch.cuda.current_stream(self._device)
        self._written = self._engine.record_event()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """See CopyOrder."""
        with self.apart():
            torch.cuda.current_stream(self._device).wait_event(self._written)
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

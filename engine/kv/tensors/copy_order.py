"""Orders an engine's kernels and the copies of other threads on the blocks of a pool."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, cast

import torch

from engine.kv.interface import HostOrdered


class CopyOrder(Protocol):
    """`mark` is called in the engine's thread, all other methods in any thread."""

    def mark(self) -> object:
        """See KvPool."""
        ...

    def follow(self, mark: object) -> None:
        """See KvPool."""
        ...

    def synchronize(self) -> None:
        """See KvPool."""
        ...

    def copying(self) -> AbstractContextManager[None]:
        """Context of the calling thread's copies; at its end they are complete."""
        ...


class HostOrder(HostOrdered):
    """CopyOrder of the CPU."""

    def copying(self) -> AbstractContextManager[None]:
        return nullcontext()


class StreamOrder:
    """CopyOrder of a CUDA device. Each thread copies on its own stream, concurrent with the
    engine's kernels, and waits there for kernels that must come first.

    Kernel launches return before the kernel runs, so a mark is an event in the engine's stream,
    recorded when blocks pass to a transfer. Later kernels do not touch these blocks and are not
    waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own = threading.local()

    def mark(self) -> object:
        """See KvPool. Records on the current stream, which is the engine's."""
        return torch.cuda.current_stream(self._device).record_event()

    def follow(self, mark: object) -> None:
        """See KvPool."""
        if mark is not None:
            self._stream().wait_event(cast(torch.Event, mark))

    def synchronize(self) -> None:
        """See KvPool. A failed context reports its error at every call, so the thread's own stream
        is enough; waiting for the device would wait for the engine's steps."""
        self._stream().synchronize()

    @contextmanager
    def copying(self) -> Iterator[None]:
        """See CopyOrder. The wait at the end releases the GIL."""
        stream = self._stream()
        with torch.cuda.stream(stream):
            try:
                yield
            finally:
                stream.synchronize()

    def _stream(self) -> torch.cuda.Stream:
        """The calling thread's stream."""
        if not hasattr(self._own, "stream"):
            self._own.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream: torch.cuda.Stream = self._own.stream
        return stream


def copy_order(device: torch.device) -> CopyOrder:
    """The order for a pool on `device`."""
    return StreamOrder(device) if device.type == "cuda" else HostOrder()

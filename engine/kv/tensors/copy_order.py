"""In which order an engine's kernels and the copies of other threads touch the blocks of a pool."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, cast

import torch

from engine.kv.interface import HostOrdered


class CopyOrder(Protocol):
    """`mark` is called in the engine's thread, all else in any."""

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
        """For the calling thread's copies. What is started in the context is over at its end."""
        ...


class HostOrder(HostOrdered):
    """See CopyOrder. Of the CPU."""

    def copying(self) -> AbstractContextManager[None]:
        """See CopyOrder."""
        return nullcontext()


class StreamOrder:
    """See CopyOrder. Of a CUDA device: each thread copies on a stream of its own, beside the
    engine's kernels, and waits there for those that it must not overtake.

    A call of a kernel returns before the kernel has run. So a mark is an event: a place in the
    engine's stream. It is taken when blocks become somebody's to read or to write; what the engine
    is given after that does not touch them, and is not waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own = threading.local()

    def mark(self) -> object:
        """See KvPool. The engine's stream is the one that is current in its thread."""
        return torch.cuda.current_stream(self._device).record_event()

    def follow(self, mark: object) -> None:
        """See KvPool."""
        if mark is not None:
            self._stream().wait_event(cast(torch.Event, mark))

    def synchronize(self) -> None:
        """See KvPool. A context that has failed reports it at every call, so that the thread's own
        stream answers for the device; a wait for all of it would wait for the engine's steps."""
        self._stream().synchronize()

    @contextmanager
    def copying(self) -> Iterator[None]:
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

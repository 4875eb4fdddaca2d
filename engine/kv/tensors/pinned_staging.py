"""Pinned (page-locked) buffers between a device and the host: two pieces per thread; the host
copies one while the device fills or empties the other."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

#: Bytes of a piece, two per thread: small enough for a CPU's cache, large enough to amortise the
#: start of a copy.
PIECE_BYTES = 1 << 20

Bytes = NDArray[np.uint8]


class PinnedStagingBuffer:
    """Copies run on the calling thread's current stream. Thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own = threading.local()

    def staging(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] on the device, owned by the calling thread, overwritten by its next
        call.

        Allocated on the current stream, which must be the copying one: memory freed on another
        stream may still be written by its queued kernels.
        """
        staging: torch.Tensor | None = getattr(self._own, "staging", None)
        if staging is None or len(staging) < num_bytes:
            staging = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            self._own.staging = staging
        return staging[:num_bytes]

    def to_host(self, source: torch.Tensor, data: memoryview) -> None:
        """Copy uint8 [bytes] of the device to host memory of the same size; complete on return."""
        target = np.frombuffer(data, np.uint8)
        pieces = self._pieces()
        coming: list[tuple[Callable[[], None], int]] = []
        """At most two pieces being filled by the device, and their places in `data`."""
        for number, first in enumerate(range(0, len(target), PIECE_BYTES)):
            part = source[first : first + PIECE_BYTES]
            pieces[number % 2][: len(part)].copy_(part, non_blocking=True)
            coming.append((self._fence(), first))
            if number:
                self._take(target, *coming.pop(0))
        for arrived, first in coming:
            self._take(target, arrived, first)

    def _take(self, target: Bytes, arrived: Callable[[], None], first: int) -> None:
        arrived()
        part = target[first : first + PIECE_BYTES]
        part[...] = self._pieces()[first // PIECE_BYTES % 2].numpy()[: len(part)]

    def to_device(self, data: memoryview, target: torch.Tensor) -> None:
        """Inverse of to_host. On return `data` has been read; later work on the stream sees it in
        `target`."""
        source = np.frombuffer(data, np.uint8)
        pieces = self._pieces()
        is_free: list[Callable[[], None]] = [lambda: None, lambda: None]
        for number, first in enumerate(range(0, len(source), PIECE_BYTES)):
            part = source[first : first + PIECE_BYTES]
            piece = pieces[number % 2][: len(part)]
            is_free[number % 2]()
            piece.numpy()[...] = part
            target[first : first + len(part)].copy_(piece, non_blocking=True)
            is_free[number % 2] = self._fence()
        for wait in is_free:
            wait()

    def _pieces(self) -> tuple[torch.Tensor, torch.Tensor]:
        if not hasattr(self._own, "pieces"):
            is_pinned = self._device.type == "cuda"
            both = torch.empty(2, PIECE_BYTES, dtype=torch.uint8, pin_memory=is_pinned)
            self._own.pieces = (both[0], both[1])
        pieces: tuple[torch.Tensor, torch.Tensor] = self._own.pieces
        return pieces

    def _fence(self) -> Callable[[], None]:
        """A function that waits for all copies started so far."""
        if self._device.type != "cuda":
            return lambda: None
        event = torch.cuda.current_stream(self._device).record_event()
        wait: Callable[[], None] = event.synchronize
        return wait

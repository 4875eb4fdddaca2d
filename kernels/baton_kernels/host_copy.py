"""Asynchronous copies between host and device."""

from __future__ import annotations

from typing import Any

import torch


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to a device without waiting for work queued there; return it unchanged if
    the device is the host.

    Staged in page-locked memory, which torch keeps alive until the copy is done.
    """
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


class Fence:
    """A point in a device's queue, after all work queued by the calling thread so far."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Wait until the device has reached this point. Raises RuntimeError if the device
        failed."""
        if self._event is not None:
            self._event.synchronize()


class HostCopy:
    """A copy of a device tensor in flight to the host. A host tensor is not copied: it must not
    change."""

    def __init__(self, source: torch.Tensor) -> None:
        """Queue the copy behind the work already queued on the device."""
        self._host = source
        self._done: Fence | None = None
        if source.is_cuda:
            self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._host.copy_(source, non_blocking=True)
            self._done = Fence(source.device)

    def wait(self) -> torch.Tensor:
        """Wait for the copy and return the host tensor."""
        if self._done is not None:
            self._done.wait()
        return self._host

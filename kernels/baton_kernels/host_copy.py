"""Copies between the host and a device that nobody waits for before they are needed."""

from __future__ import annotations

from typing import Any

import torch


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on a device, without a wait for what the device was given before; itself if
    that is the host.

    It goes by way of page-locked memory, which torch keeps until the copy is made.
    """
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


class Fence:
    """A place in what a device was given: what the calling thread gave it before this was made."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Until the device has come there. Raises RuntimeError if it has failed."""
        if self._event is not None:
            self._event.synchronize()


class HostCopy:
    """A device's tensor on its way to the host. A tensor of the host's own is taken as it is: it
    must not change."""

    def __init__(self, source: torch.Tensor) -> None:
        """Queue the copy behind what the device was given before."""
        self._host = source
        self._done: Fence | None = None
        if source.is_cuda:
            self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._host.copy_(source, non_blocking=True)
            self._done = Fence(source.device)

    def wait(self) -> torch.Tensor:
        """The tensor, once it is here."""
        if self._done is not None:
            self._done.wait()
        return self._host

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


class HostCopy:
    """A device's tensor on its way to the host. A tensor of the host's own is taken as it is: it
    must not change."""

    def __init__(self, source: torch.Tensor) -> None:
        """Queue the copy behind what the device was given before."""
        self._host = source
        self._done: Any = None
        if source.is_cuda:
            self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._host.copy_(source, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(torch.cuda.current_stream(source.device))

    def wait(self) -> torch.Tensor:
        """The tensor, once it is here."""
        if self._done is not None:
            self._done.synchronize()
        return self._host

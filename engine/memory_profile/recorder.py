"""Memory of this process over time: resident memory on a CPU, the allocator's history on CUDA."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

_STATM = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PERIOD_S = 0.005
_MAX_EVENTS = 1_000_000


class Point(NamedTuple):
    """Bytes in use, and bytes held from the system, since recording started. The same on a CPU."""

    at_s: float
    used_bytes: int
    reserved_bytes: int


class MemoryRecorder(AbstractContextManager["MemoryRecorder", None], Protocol):
    """Records while it is entered."""

    def points(self) -> Sequence[Point]:
        """In order of time."""
        ...


class ResidentRecorder(MemoryRecorder):
    """Growth of resident memory, read every 5 ms by a thread; a point for each change."""

    def __enter__(self) -> ResidentRecorder:
        self._points: list[Point] = []
        self._ends = threading.Event()
        self._begun_s, self._base = time.monotonic(), resident_bytes()
        self._thread = threading.Thread(target=self._read, name="resident-memory", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ends.set()
        self._thread.join()

    def points(self) -> Sequence[Point]:
        """See MemoryRecorder."""
        return self._points

    def _read(self) -> None:
        is_last = False
        while True:
            grown = max(0, resident_bytes() - self._base)
            if is_last or not self._points or self._points[-1].used_bytes != grown:
                self._points.append(Point(time.monotonic() - self._begun_s, grown, grown))
            if is_last:
                return
            is_last = self._ends.wait(_PERIOD_S)


class AllocatorRecorder(MemoryRecorder):
    """History of torch's CUDA allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._points: Sequence[Point] = ()

    def __enter__(self) -> AllocatorRecorder:
        torch.cuda.synchronize(self._device)
        torch.cuda.memory._record_memory_history(
            "all", context=None, stacks="python", max_entries=_MAX_EVENTS
        )
        self._begun_us = time.time_ns() // 1000
        return self

    def __exit__(self, *exception: object) -> None:
        torch.cuda.synchronize(self._device)
        index = self._device.index or 0
        traces = torch.cuda.memory._snapshot(self._device)["device_traces"]
        torch.cuda.memory._record_memory_history(None)
        self._points = replay(traces[index], self._begun_us)

    def points(self) -> Sequence[Point]:
        """See MemoryRecorder."""
        return self._points


def replay(events: Iterable[Mapping[str, Any]], begun_us: int) -> list[Point]:
    """Memory after each event of an allocator's history (torch.cuda.memory, "device_traces"):
    action, size in bytes, time_us. Memory of earlier allocations counts as zero."""
    used = reserved = 0
    points = [Point(0.0, 0, 0)]
    for event in events:
        match event["action"]:
            case "alloc":
                used += event["size"]
            case "free_completed":
                used -= event["size"]
            case "segment_alloc" | "segment_map":
                reserved += event["size"]
            case "segment_free" | "segment_unmap":
                reserved -= event["size"]
            case _:
                continue
        at_s = max(0.0, (event["time_us"] - begun_us) / 1e6)
        points.append(Point(at_s, max(0, used), max(0, reserved)))
    return points


def recorder_of(device: torch.device) -> MemoryRecorder:
    """The recorder for a device."""
    return AllocatorRecorder(device) if device.type == "cuda" else ResidentRecorder()


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(_STATM.read_text().split()[1]) * _PAGE_BYTES


def peak_bytes(points: Sequence[Point]) -> int:
    """Most bytes in use."""
    return max((point.used_bytes for point in points), default=0)

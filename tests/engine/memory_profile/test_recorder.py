"""Memory of a process over time."""

from __future__ import annotations

import time

import torch

from engine.memory_profile.recorder import Point, ResidentRecorder, peak_bytes, replay


def test_an_allocators_history_is_replayed() -> None:
    events = [
        {"action": "segment_alloc", "size": 20, "time_us": 1_000_000},
        {"action": "alloc", "size": 8, "time_us": 1_000_000},
        {"action": "alloc", "size": 4, "time_us": 1_500_000},
        {"action": "free_requested", "size": 8, "time_us": 1_600_000},
        {"action": "free_completed", "size": 8, "time_us": 2_000_000},
    ]
    points = replay(events, 1_000_000)
    assert points[-3:] == [Point(0.0, 8, 20), Point(0.5, 12, 20), Point(1.0, 4, 20)]
    assert peak_bytes(points) == 12
    # An allocation from before the record is freed, and its segment given back.
    events += [
        {"action": "free_completed", "size": 40, "time_us": 2_500_000},
        {"action": "segment_free", "size": 60, "time_us": 2_500_000},
        {"action": "segment_map", "size": 50, "time_us": 3_000_000},
    ]
    assert replay(events, 1_000_000)[-3:] == [
        Point(1.5, 0, 20),
        Point(1.5, 0, 0),
        Point(2.0, 0, 10),
    ]
    assert peak_bytes(replay([], 0)) == 0


def test_memory_that_comes_and_goes_is_seen() -> None:
    size = 256 << 20  # more than this process gives back meanwhile
    with ResidentRecorder() as recorder:
        held = torch.ones(size, dtype=torch.uint8)
        end_s = time.monotonic() + 60
        while peak_bytes(recorder.points()) < size // 2 and time.monotonic() < end_s:
            held.add_(1)
        del held
    assert peak_bytes(recorder.points()) > size // 2
    assert recorder.points()[-1].used_bytes < size // 2

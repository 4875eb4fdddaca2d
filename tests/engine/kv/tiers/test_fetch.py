"""A fetch that is cancelled writes nothing more."""

from __future__ import annotations

import threading

from engine.kv.tiers.fetch import Fetch, WantedBlock
from tests.engine.kv.tiers.conftest import IDENTITY


def fetch_of(*levels: int) -> Fetch:
    wanted = [WantedBlock(IDENTITY, n, b"", True, level) for n, level in enumerate(levels)]
    return Fetch("key", wanted, None)


def test_segments_are_runs_of_blocks_of_one_tier() -> None:
    segments = fetch_of(0, 0, 1, 0, 0).segments
    assert [(each.level, each.start, each.end) for each in segments] == [
        (0, 0, 2),
        (1, 2, 3),
        (0, 3, 5),
    ]


def test_blocks_from_the_first_missing_one_on_are_not_written() -> None:
    fetch, written = fetch_of(0, 0, 0, 0), list[int]()
    assert fetch.write(0, lambda: written.append(0))
    fetch.stop_at(2)
    assert fetch.write(1, lambda: written.append(1))
    assert not fetch.write(2, lambda: written.append(2))
    assert written == [0, 1]
    assert fetch.num_loaded == 2


def test_cancelling_waits_for_the_block_that_is_being_written() -> None:
    fetch, order = fetch_of(0, 0), list[str]()
    is_writing, may_end = threading.Event(), threading.Event()

    def write() -> None:
        is_writing.set()
        may_end.wait()
        order.append("written")

    def cancel() -> None:
        fetch.cancel()
        order.append("cancelled")

    writer = threading.Thread(target=fetch.write, args=(0, write))
    writer.start()
    is_writing.wait()
    canceller = threading.Thread(target=cancel)
    canceller.start()
    may_end.set()
    canceller.join()
    writer.join()
    assert order == ["written", "cancelled"]
    assert not fetch.write(1, lambda: order.append("late"))
    assert order == ["written", "cancelled"]

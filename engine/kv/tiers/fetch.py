"""A fetch: blocks of one sequence that come from tiers. It can be cancelled at any time, and then
writes no block any more."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from engine.kv.prefix_index import BlockIdentity


@dataclass(frozen=True, slots=True)
class WantedBlock:
    """A block to fetch. level: index of its tier; record_key: its key there; needs_whole: whether
    the KV of all layer groups is needed."""

    identity: BlockIdentity
    block_id: int
    record_key: bytes
    needs_whole: bool
    level: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Adjacent blocks [start, end) of a fetch from one tier, and how it ended. seconds: since
    its begin; num_blocks: blocks that were read."""

    level: int
    start: int
    end: int
    num_blocks: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


class Fetch:
    """The engine loop's thread makes and cancels it; tiers' threads write the blocks.

    key: of the sequence. mark: see KvPool.mark.
    """

    def __init__(self, key: Hashable, blocks: Sequence[WantedBlock], mark: object) -> None:
        self.key = key
        self.blocks = tuple(blocks)
        self.mark = mark
        self.done: list[Segment] = []
        """Segments that have ended, in order of their ends."""
        self._lock = threading.Lock()
        """Held while a block is written."""
        self._end = len(self.blocks)
        self._num_segments = len(self.segments)

    @property
    def segments(self) -> list[Segment]:
        """The blocks, split by tier."""
        bounds = [
            place
            for place in range(1, len(self.blocks))
            if self.blocks[place].level != self.blocks[place - 1].level
        ]
        starts, ends = [0, *bounds], [*bounds, len(self.blocks)]
        return [
            Segment(self.blocks[start].level, start, end)
            for start, end in zip(starts, ends, strict=True)
        ]

    @property
    def num_loaded(self) -> int:
        """Leading blocks that are written, once the fetch is over."""
        return self._end

    def wants(self, place: int) -> bool:
        """Whether the block at this place is still of use."""
        return place < self._end

    def stop_at(self, place: int) -> None:
        """Blocks from this place on cannot be fetched."""
        with self._lock:
            self._end = min(self._end, place)

    def cancel(self) -> None:
        """After this no block is written; the blocks belong to the caller alone."""
        self.stop_at(0)

    def write(self, place: int, write: Callable[[], None]) -> bool:
        """Write a block, unless it is of no use any more. Returns whether it was written."""
        with self._lock:
            if not self.wants(place):
                return False
            write()
            return True

    def end_segment(self, segment: Segment) -> bool:
        """Record the end of a segment. Returns whether it was the last one."""
        with self._lock:
            self.done.append(segment)
            return len(self.done) == self._num_segments

"""An engine with counted launches, which fail when the test says so and may touch only leased
blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field

from baton.errors import EngineFault
from baton.types import Sample
from engine.interface import Batch, Launched, LayersDone, SequenceSlice
from engine.kv.pool import BlockPool
from engine.oracle import OracleEngine


@dataclass
class WatchedLaunch:
    """Implements Launched."""

    inner: Launched
    batch: Batch
    in_flight: deque[Batch]
    fails: bool

    def samples(self) -> tuple[tuple[Sample, ...], ...]:
        assert self.in_flight.popleft() is self.batch
        samples = self.inner.samples()
        if self.fails:
            raise EngineFault("the samples of this launch cannot be had")
        return samples


@dataclass
class Watch:
    """What was launched and not collected, and what was launched at all. Launches that fail by
    their numbers, or the numbers less 1000, which can be launched and are computed, but fail when
    they are collected."""

    engine: OracleEngine
    in_flight: deque[Batch] = field(default_factory=deque)
    launches: list[Batch] = field(default_factory=list)
    fails: frozenset[int] = frozenset()
    num_ahead: int = 0

    def launch(self, batch: Batch, layers_done: LayersDone | None = None) -> Launched:
        self.launches.append(batch)
        if len(self.launches) in self.fails:
            raise EngineFault("this launch fails")
        self.num_ahead += len(self.in_flight)
        inner = OracleEngine.launch(self.engine, batch, layers_done)
        kept = Batch(tuple(s._replace(block_table=tuple(s.block_table)) for s in batch.slices))
        self.in_flight.append(kept)
        return WatchedLaunch(inner, kept, self.in_flight, len(self.launches) + 1000 in self.fails)


def check_blocks_in_flight(
    pool: BlockPool, in_flight: Collection[Batch], num_stages: int = 1
) -> None:
    """Each block has one state. Between steps one launch is in flight, or one less than stages;
    what they write is leased, and by one owner. A sequence is in several as consecutive chunks
    alone, of which the last may draw."""
    pool.check_integrity()
    assert len(in_flight) <= max(1, num_stages - 1)
    available = {*pool.free_block_ids, *pool.cached_block_ids}
    owners: dict[int, Hashable] = {}
    ends: dict[Hashable, int] = {}
    for part in (part for batch in in_flight for part in batch.slices):
        assert available.isdisjoint(part.block_table)
        assert ends.get(part.key, part.start) == part.start, "a launch is missing between two"
        # What draws may not be followed: its next token is not known.
        end = part.start + len(part.token_ids)
        ends[part.key] = -1 if is_drawing(part) else end
        for block in blocks_written(part, pool.block_size):
            assert owners.setdefault(block, part.key) == part.key


def is_drawing(part: SequenceSlice) -> bool:
    return any(row.scored_token_id is None for row in part.rows)


def blocks_written(part: SequenceSlice, block_size: int) -> Sequence[int]:
    end = part.start + len(part.token_ids)
    return [
        part.block_table[index] for index in range(part.start // block_size, -(-end // block_size))
    ]

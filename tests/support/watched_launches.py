"""An engine with counted launches, which fail when the test says so and may touch only leased
blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from baton.errors import EngineFault
from baton.types import Sample
from engine.interface import Batch, Launched, LayersDone
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


def check_blocks_in_flight(pool: BlockPool, in_flight: Collection[Batch]) -> None:
    """Each block has one state, at most one launch is in flight, and what it writes is leased, and
    by one owner."""
    pool.check_integrity()
    assert len(in_flight) <= 1
    available = {*pool.free_block_ids, *pool.cached_block_ids}
    written = [block for batch in in_flight for block in blocks_written(batch, pool.block_size)]
    assert len(written) == len(set(written))
    assert available.isdisjoint(written)
    read = {block for batch in in_flight for part in batch.slices for block in part.block_table}
    assert available.isdisjoint(read)


def blocks_written(batch: Batch, block_size: int) -> list[int]:
    return [
        part.block_table[index]
        for part in batch.slices
        for index in range(
            part.start // block_size, -(-(part.start + len(part.token_ids)) // block_size)
        )
    ]

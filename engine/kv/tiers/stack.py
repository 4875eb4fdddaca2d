"""The tiers of one worker, as one: what to keep goes in at the top and sinks, what is wanted is
found by one lookup.

    device ──save──> host ──evicted──> disk         each evicts its least recently used records
        └──────save───────────────────────> store   written at once, for other workers

Each tier has a thread of its own, which copies, checks and waits; the engine loop's thread only
looks up, submits and gets reports. A tier that fails is switched off, for good unless it is shared
or was only late; a tier that does not pay is left alone.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from engine.kv.interface import KvPool
from engine.kv.prefix_index import BlockIdentity, PrefixBlock
from engine.kv.tiers.fetch import Fetch, Segment, WantedBlock
from engine.kv.tiers.interface import Record, Tier, TierFailed
from engine.kv.tiers.record import BadRecord, RecordFormat, record_key
from engine.kv.tiers.runner import Runner

_log = logging.getLogger("baton.kv.tiers")

#: Records per request to a tier.
_BATCH = 16
#: Bytes that may wait to be written to one tier; what comes beyond is not kept.
_MAX_PENDING_BYTES = 256 << 20
#: Wrong records after which a tier is not trusted any more.
_MAX_BAD_RECORDS = 64
#: Blocks of the two measurements at the start.
_MEASURED_BLOCKS = (1, 8)


@dataclass(frozen=True, slots=True)
class Saved:
    """Report: blocks of one `save` are dealt with."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """Report: all segments of a fetch have ended."""

    fetch: Fetch


@dataclass(frozen=True, slots=True)
class Measured:
    """Report: reading num_bytes from a tier, outside any fetch, took so long. num_bytes: 0 if it
    failed."""

    level: int
    num_bytes: int
    seconds: float


TierReport = Saved | Fetched | Measured


class Level:
    """A tier with its thread and counters."""

    def __init__(self, tier: Tier, runner: Runner) -> None:
        self.tier = tier
        self.runner = runner
        self.pays = False
        """Set by the engine loop, from what was measured."""
        self.off_reason = ""
        self.may_return = False
        """Whether a measurement that succeeds switches the tier on again."""
        self.num_evictions = 0
        self.num_bad_records = 0
        self.num_pending_bytes = 0
        self._lock = threading.Lock()

    @property
    def is_used(self) -> bool:
        return self.pays and not self.off_reason

    def switch_off(self, why: str, *, may_return: bool = False) -> None:
        """Log the reason once. A shared tier may return in any case, another one unless any of the
        reasons is for good."""
        with self._lock:
            is_new, self.off_reason = not self.off_reason, self.off_reason or why
            may_return = may_return and (is_new or self.may_return)
            self.may_return = may_return or self.tier.is_shared
        if is_new:
            _log.error("KV tier %s is switched off: %s", self.tier.name, why)

    def on_error(self, error: Exception) -> None:
        """A job of the tier's thread raised what is no TierFailed."""
        _log.error("KV tier %s failed", self.tier.name, exc_info=error)
        self.switch_off(f"an internal fault: {error!r}")

    def switch_on(self) -> None:
        with self._lock:
            was_off, self.off_reason = bool(self.off_reason), ""
        if was_off:
            _log.warning("KV tier %s is back", self.tier.name)

    def add_pending(self, num_bytes: int) -> None:
        with self._lock:
            self.num_pending_bytes += num_bytes


class TierStack:
    """Called by the engine loop's thread; reports come from tiers' threads."""

    def __init__(
        self,
        kv: KvPool,
        record_format: RecordFormat,
        levels: Sequence[Level],
        clock: Callable[[], float],
    ) -> None:
        """levels: fastest first."""
        self.levels = tuple(levels)
        self.max_record_bytes = record_format.max_bytes
        self.secret = record_format.secret
        """Secret of the pool's chain keys, which are those of the records."""
        self._kv = kv
        self._format = record_format
        self._report: Callable[[TierReport], None] = lambda _: None
        self._clock = clock
        self.measured: list[Measured] = []
        """By `measure`."""

    def report_to(self, report: Callable[[TierReport], None]) -> None:
        """Have reports of saves, fetches and probes passed to `report`, in tiers' threads."""
        self._report = report

    def measure(self) -> None:
        """Time reads of each tier, before it is used."""
        for number, level in enumerate(self.levels):
            try:
                for num_blocks in _MEASURED_BLOCKS:
                    self.measured.append(self._measure(number, num_blocks))
            except TierFailed as error:
                level.switch_off(str(error))

    def find(self, key: bytes) -> int | None:
        """The fastest tier that is used and has, or may have, this record."""
        for number, level in enumerate(self.levels):
            if level.is_used and (level.tier.is_shared or level.tier.has(key)):
                return number
        return None

    def is_saved(self, block: PrefixBlock) -> bool:
        """Whether the tier that blocks are saved to has this one, which is marked as used. True if
        there is no such tier."""
        if self._top is None:
            return True
        tier, kinds = self.levels[self._top].tier, {True, block.is_whole}
        keys = [record_key(block.identity, is_whole=is_whole) for is_whole in kinds]
        for key in keys:
            tier.touch(key)
        return any(map(tier.has, keys))

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark the records of a prefix as used, in order of its blocks: the last ones are given up
        first, because they are of no use without those before."""
        for key in reversed(keys):
            for level in self.levels:
                level.tier.touch(key)

    def save(
        self, blocks: Sequence[PrefixBlock], is_current: Callable[[PrefixBlock], bool]
    ) -> None:
        """Copy blocks to the fastest tier that is used. Blocks are not held meanwhile: is_current,
        called after each copy, finds out whether the block was overwritten."""
        top = self._top
        if top is None:
            self._report(Saved(len(blocks)))
            return
        job = partial(self._save, top, tuple(blocks), is_current, self._kv.mark())
        self.levels[top].runner.submit(job)

    def mark(self) -> object:
        """See KvPool.mark."""
        return self._kv.mark()

    def fetch(self, fetch: Fetch) -> None:
        begin_s = self._clock()
        for segment in fetch.segments:
            level = self.levels[segment.level]
            level.runner.submit(partial(self._fetch, fetch, segment, begin_s), is_urgent=True)

    def probe(self, number: int) -> None:
        """Measure a tier again, and switch it on if it may return."""
        self.levels[number].runner.submit(partial(self._probe, number))

    def close(self) -> None:
        """End all threads. A fetch must not be under way."""
        for level in self.levels:
            level.runner.close(level.tier.close)

    # In tiers' threads

    @property
    def _top(self) -> int | None:
        return next((n for n, level in enumerate(self.levels) if level.is_used), None)

    def _save(
        self,
        top: int,
        blocks: Sequence[PrefixBlock],
        is_current: Callable[[PrefixBlock], bool],
        mark: object,
    ) -> None:
        try:
            self._kv.follow(mark)
            for block in blocks:
                self._save_block(top, block, is_current)
        finally:
            self._report(Saved(len(blocks)))

    def _save_block(
        self, top: int, block: PrefixBlock, is_current: Callable[[PrefixBlock], bool]
    ) -> None:
        identity, is_whole = block.identity, block.is_whole
        try:
            record = self._format.pack(self._kv, block.block_id, identity, is_whole=is_whole)
        except ValueError:
            return  # the block has lost a group's slot meanwhile
        if not is_current(block):
            return
        self._format.seal(record, identity, is_whole=is_whole)
        key = record_key(identity, is_whole=is_whole)
        self._put(top, key, record)
        for number in range(top + 1, len(self.levels)):
            if self.levels[number].tier.is_shared:
                self._hand_down(number, key, record)

    def _put(self, number: int, key: bytes, record: Record) -> None:
        level = self.levels[number]
        if level.off_reason:
            return
        try:
            evicted = level.tier.put(key, record)
        except TierFailed as error:
            level.switch_off(str(error))
            return
        level.num_evictions += len(evicted)
        for each in evicted:
            lower = number + 1
            if each.record is not None and lower < len(self.levels):
                self._hand_down(lower, each.key, each.record)

    def _hand_down(self, number: int, key: bytes, record: Record) -> None:
        """Have a record written to a lower tier, unless it has it, does not pay, or is behind."""
        level = self.levels[number]
        if not level.is_used or level.tier.has(key):
            return
        num_bytes = len(record)
        if level.num_pending_bytes + num_bytes > _MAX_PENDING_BYTES:
            return
        level.add_pending(num_bytes)

        def write() -> None:
            level.add_pending(-num_bytes)
            self._put(number, key, record)

        level.runner.submit(write)

    def _fetch(self, fetch: Fetch, segment: Segment, begin_s: float) -> None:
        num_blocks = num_bytes = 0
        is_read, level = False, self.levels[segment.level]
        try:
            self._kv.follow(fetch.mark)
            for start in range(segment.start, segment.end, _BATCH):
                if level.off_reason or not fetch.wants(start):
                    fetch.stop_at(start)
                    break
                for size in self._read(fetch, range(start, min(start + _BATCH, segment.end))):
                    num_blocks, num_bytes = num_blocks + 1, num_bytes + size
            is_read = True
        except TierFailed as error:
            level.switch_off(str(error))
        finally:
            if not is_read:
                fetch.stop_at(segment.start)
            seconds = self._clock() - begin_s
            ended = replace(segment, num_blocks=num_blocks, num_bytes=num_bytes, seconds=seconds)
            if fetch.end_segment(ended):
                self._report(Fetched(fetch))

    def _read(self, fetch: Fetch, places: range) -> Iterator[int]:
        """Read and write these blocks of a fetch, up to the first that is not there; yields the
        bytes of each."""
        wanted = [fetch.blocks[place] for place in places]
        level = self.levels[wanted[0].level]
        records = level.tier.get([block.record_key for block in wanted])
        for place, block, record in zip(places, wanted, records, strict=True):
            payload = None
            if record is not None:
                payload = self._opened(level, record, block.record_key, block.identity)
            if record is None or payload is None:
                fetch.stop_at(place)
                return
            if not fetch.write(place, partial(self._unpack, block, payload)):
                return
            yield len(record)

    def _unpack(self, block: WantedBlock, payload: memoryview) -> None:
        """Returns when the block is written: a fetch may be cancelled right after."""
        self._format.unpack(self._kv, block.block_id, payload, is_whole=block.needs_whole)
        self._kv.synchronize()

    def _opened(
        self, level: Level, record: Record, key: bytes, identity: BlockIdentity
    ) -> memoryview | None:
        """The payload of a record; None, and the record removed, if it is not what was kept under
        its key. Raises TierFailed, also after many such records."""
        try:
            return self._format.open(record, identity, needs_whole=bool(key[-1]))
        except BadRecord as error:
            level.num_bad_records += 1
            if level.num_bad_records >= _MAX_BAD_RECORDS:
                raise TierFailed(f"{level.num_bad_records} records were wrong: {error}") from error
            _log.warning("a record of KV tier %s is not used: %s", level.tier.name, error)
            level.tier.remove(key)
            return None

    def _probe(self, number: int) -> None:
        level = self.levels[number]
        measured = Measured(number, 0, 0.0)
        try:
            if level.may_return or not level.off_reason:
                measured = self._measure(number, _MEASURED_BLOCKS[-1])
                level.switch_on()
        except TierFailed as error:
            level.switch_off(str(error))
        finally:
            self._report(measured)

    def _measure(self, number: int, num_blocks: int) -> Measured:
        """Write records that no prompt asks for, time reading them, and remove them. Raises
        TierFailed."""
        tier = self.levels[number].tier
        record = self._format.blank()
        keys = [os.urandom(32) + bytes([False]) for _ in range(num_blocks)]
        for key in keys:
            tier.put(key, record)
        tier.cool(keys)
        begin_s = self._clock()
        # A small tier has given up the first of them.
        found = [each for each in tier.get(keys) if each is not None]
        if not found or not all(map(self._format.is_blank, found)):
            raise TierFailed("it does not return what was written to it")
        seconds = self._clock() - begin_s
        for key in keys:
            tier.remove(key)
        return Measured(number, len(found) * len(record), seconds)

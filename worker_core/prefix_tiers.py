"""Prefixes move down to tiers of KV before the device pool evicts them, and back up for prompts
that lack them.

save    while few blocks are free, each step gives some cached blocks to the tiers, those that
        would be evicted next first; the tiers copy them without holding them, and drop the copy of
        a block that was evicted meanwhile. If none of them is read, only samples are saved
fetch   an admitted prompt waits (Stage.FETCHING) while a tier's thread writes the blocks that it
        lacks into its own lease, if that takes less time than computing them, by what was measured
        here; then it goes on as if these blocks had been cached. Cancelling a fetch takes effect at
        once, so its blocks can be released in any state
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import groupby

from baton.types import TierLoad
from engine.kv.layout import LayerGroups
from engine.kv.pool import BlockPool
from engine.kv.prefix_index import BlockIdentity
from engine.kv.tiers.fetch import Fetch, WantedBlock
from engine.kv.tiers.record import record_key
from engine.kv.tiers.stack import Fetched, Measured, Saved, TierReport, TierStack
from worker_core.costs import Costs
from worker_core.sequence import Stage, WorkerSequence
from worker_core.tier_costs import Part, SavingGain, TierCosts

#: Share of the pool's blocks below which free blocks are few: from then on cached ones are saved,
#: so that evicting them loses nothing.
_FEW_FREE = 0.5
#: Blocks per save, and of all saves in flight.
_SAVE_BLOCKS, _MAX_SAVING_BLOCKS = 16, 64
#: Times that a pool's blocks are saved before it counts that none of them was read.
_TRIAL_POOLS = 8
#: Seconds after which a fetch is given up and its tier switched off, besides a multiple of the
#: estimate.
_MAX_FETCH_S, _MAX_FETCH_FACTOR = 2.0, 8.0
#: Least seconds between two measurements of a tier that is not used, and as a multiple of the last
#: one's own.
_PROBE_S, _PROBE_PAUSE_FACTOR = 10.0, 10.0


@dataclass(frozen=True, slots=True)
class _Fetching:
    """A fetch under way. resume: called in the end, unless the sequence has left. Times on the
    engine loop's clock."""

    sequence: WorkerSequence
    fetch: Fetch
    resume: Callable[[], None]
    begin_s: float
    deadline_s: float


@dataclass(frozen=True, slots=True)
class _Found:
    """A block's record. level: index of the tier that has it, or may have it."""

    identity: BlockIdentity
    record_key: bytes
    level: int

    @property
    def is_whole(self) -> bool:
        return bool(self.record_key[-1])


class PrefixTiers:
    """Used by the engine loop's thread. Reports of the stack reach it as commands."""

    def __init__(
        self,
        stack: TierStack,
        pool: BlockPool,
        groups: LayerGroups,
        costs: Costs,
        clock: Callable[[], float],
    ) -> None:
        """groups: of the pool; they keep all blocks, and sequences may share prefixes."""
        self._stack = stack
        self._pool = pool
        self._groups = groups
        self._clock = clock
        levels = stack.levels
        self._costs = TierCosts(costs, len(levels), pool.block_size, stack.max_record_bytes)
        self._fetching: dict[Hashable, _Fetching] = {}
        self._num_saving = 0
        self._gain = SavingGain(_TRIAL_POOLS * pool.num_blocks)
        self._is_shared = any(level.tier.is_shared for level in levels)
        """Whether others may read what is saved here, unseen."""
        self._hits = [0] * len(levels)
        self._misses = [0] * len(levels)
        self._probe_at_s = [clock() + _PROBE_S] * len(levels)
        """Infinite while a measurement is under way."""
        pool.watch_cached()
        for each in stack.measured:
            self.on_report(each)

    # Every step

    def step(self) -> None:
        """Give up overdue fetches, judge tiers, save blocks."""
        now_s = self._clock()
        for number, level in enumerate(self._stack.levels):
            level.pays = self._costs.pays(number)
            if not level.is_used and now_s >= self._probe_at_s[number]:
                self._probe_at_s[number] = math.inf
                self._stack.probe(number)
        self._save()
        overdue = [each for each in self._fetching.values() if now_s > each.deadline_s]
        for each in overdue:
            self._switch_off_late(each, now_s)
            each.fetch.cancel()
            self._end(each)

    def _switch_off_late(self, each: _Fetching, now_s: float) -> None:
        ended = {(segment.level, segment.start) for segment in each.fetch.done}
        for segment in each.fetch.segments:
            if (segment.level, segment.start) not in ended:
                level = self._stack.levels[segment.level]
                why = f"no answer within {now_s - each.begin_s:.1f} s"
                level.switch_off(why, may_return=True)
                self._num_saving = 0  # its saves may never end
                return

    def _save(self) -> None:
        if self._pool.counts().free > _FEW_FREE * self._pool.num_blocks:
            return
        if not any(level.is_used for level in self._stack.levels):
            return  # blocks stay unsaved until a tier is used
        most = min(_SAVE_BLOCKS, _MAX_SAVING_BLOCKS - self._num_saving)
        taken = self._pool.take_unsaved(most)
        blocks = [block for block in taken if not self._stack.is_saved(block)]
        if blocks and (self._is_shared or self._gain.wants(len(blocks))):
            self._num_saving += len(blocks)
            self._stack.save(blocks, self._pool.is_indexed)

    # Fetching

    def fetch(
        self, sequence: WorkerSequence, max_num_blocks: int, resume: Callable[[], None]
    ) -> bool:
        """Begin to fetch the blocks that a new sequence lacks, if a tier has them and that pays.
        Returns whether it waits now; then `resume` is called in the end, unless it leaves before.

        max_num_blocks: that a sequence with few blocks may take for that.
        """
        lease, size = sequence.lease, self._pool.block_size
        found = self._find(sequence)
        parts = [Part(level, len(list(group))) for level, group in groupby(f.level for f in found)]
        is_shared = [level.tier.is_shared for level in self._stack.levels]
        num_blocks = self._num_usable(sequence, found, self._costs.num_worth(parts, is_shared))
        end = lease.num_cached_tokens + num_blocks * size
        whole_start = self._groups.whole_start(end)
        if not num_blocks or not lease.reserve(whole_start, end):
            return False
        lease.extend(end, max_num_blocks)
        wanted = [
            WantedBlock(each.identity, block_id, each.record_key, first >= whole_start, each.level)
            for each, block_id, first in zip(
                found[:num_blocks],
                lease.block_ids[lease.num_cached_tokens // size :],
                range(lease.num_cached_tokens, end, size),
                strict=False,
            )
        ]
        if wanted:
            self._begin(sequence, wanted, resume)
        return bool(wanted)

    def on_report(self, report: TierReport) -> None:
        match report:
            case Saved(num_blocks):
                self._num_saving = max(0, self._num_saving - num_blocks)
            case Measured(level, num_bytes, seconds):
                pause_s = max(_PROBE_S, _PROBE_PAUSE_FACTOR * seconds)
                self._probe_at_s[level] = self._clock() + pause_s
                if num_bytes:
                    self._costs.observe_read(level, num_bytes, seconds)
            case Fetched(fetch):
                each = self._fetching.get(fetch.key)
                if each and each.fetch is fetch:
                    if each.sequence.fetch is fetch:  # a cancelled one says nothing of its tiers
                        self._observe(each)
                    self._end(each)

    def loads(self) -> tuple[TierLoad, ...]:
        return tuple(
            TierLoad(
                name=level.tier.name,
                off_reason=level.off_reason,
                pays=level.pays,
                num_bytes=level.tier.num_bytes,
                num_hits=self._hits[number],
                num_misses=self._misses[number],
                num_evictions=level.num_evictions,
                saved_ms=self._costs.saved_s[number] * 1e3,
                lost_ms=self._costs.lost_s[number] * 1e3,
            )
            for number, level in enumerate(self._stack.levels)
        )

    def _find(self, sequence: WorkerSequence) -> list[_Found]:
        """The records of the blocks that a sequence lacks, up to the first that no tier has. Counts
        hits and misses of tiers that know what they have."""
        found: list[_Found] = []
        # The last token is always computed, because its logits are needed.
        token_ids = sequence.token_ids[:-1]
        for identity in sequence.lease.unindexed(token_ids):
            kinds = (True, False) if self._groups.has_partial else (True,)
            keys = [record_key(identity, is_whole=is_whole) for is_whole in kinds]
            asked = ((self._stack.find(key), key) for key in keys)
            level, key = next((each for each in asked if each[0] is not None), (None, b""))
            if level is None:
                break
            found.append(_Found(identity, key, level))
        self._stack.touch([each.record_key for each in found])
        num_lacking = len(token_ids) // self._pool.block_size
        num_lacking -= sequence.lease.num_cached_tokens // self._pool.block_size
        for number, each_level in enumerate(self._stack.levels):
            num_hits = sum(each.level == number for each in found)
            if each_level.is_used and not each_level.tier.is_shared:
                num_lacking -= num_hits
                self._hits[number] += num_hits
                self._misses[number] += num_lacking
        return found

    def _num_usable(self, sequence: WorkerSequence, found: list[_Found], most: int) -> int:
        """Leading blocks, at most `most`, that a sequence can resume from: groups that keep fewer
        tokens must have the KV of those before the end."""
        size, num_cached = self._pool.block_size, sequence.lease.num_cached_tokens
        for num_blocks in range(most, 0, -1):
            start = self._groups.whole_start(num_cached + num_blocks * size)
            window = found[max(0, start - num_cached) // size : num_blocks]
            if all(each.is_whole for each in window):
                return num_blocks
        return 0

    def _begin(
        self, sequence: WorkerSequence, wanted: list[WantedBlock], resume: Callable[[], None]
    ) -> None:
        now_s = self._clock()
        fetch = Fetch(sequence.key, wanted, self._stack.mark())
        expected_s = self._costs.expected_s((s.level, s.end - s.start) for s in fetch.segments)
        deadline_s = now_s + max(_MAX_FETCH_S, _MAX_FETCH_FACTOR * expected_s)
        self._fetching[sequence.key] = _Fetching(sequence, fetch, resume, now_s, deadline_s)
        sequence.stage, sequence.fetch = Stage.FETCHING, fetch
        self._stack.fetch(fetch)

    def _observe(self, each: _Fetching) -> None:
        """Learn from a fetch that has ended. What the engine loop took to notice counts, shared
        among the tiers."""
        done, waited_s = each.fetch.done, self._clock() - each.begin_s
        unnoticed_s = waited_s - max(segment.seconds for segment in done)
        for segment in done:
            num_asked = segment.end - segment.start
            if self._stack.levels[segment.level].tier.is_shared:
                self._hits[segment.level] += segment.num_blocks
                self._misses[segment.level] += num_asked - segment.num_blocks
                self._costs.observe_share(segment.level, segment.num_blocks / num_asked)
            seconds = segment.seconds + unnoticed_s / len(done)
            if segment.num_blocks:
                self._gain.on_read()
                self._costs.observe_read(segment.level, segment.num_bytes, seconds)
            self._costs.observe_use(segment.level, segment.num_blocks, waited_s / len(done))

    def _end(self, each: _Fetching) -> None:
        """Have the sequence go on with what was fetched, unless it has left."""
        del self._fetching[each.fetch.key]
        sequence, num_blocks = each.sequence, each.fetch.num_loaded
        if sequence.fetch is not each.fetch:
            return
        sequence.stage, sequence.fetch = Stage.RUNNING, None
        if self._groups.has_partial and num_blocks < len(each.fetch.blocks):
            num_blocks = 0  # groups that keep fewer tokens lack those before the end
        if num_blocks:
            lease = sequence.lease
            end = lease.num_cached_tokens + num_blocks * self._pool.block_size
            lease.received(self._groups.whole_start(end))
            lease.index(sequence.token_ids, end)
            lease.slide(sequence.token_ids, end)
            sequence.num_computed_tokens = end
        each.resume()

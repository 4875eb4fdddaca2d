"""State of a worker: sequences and beams with their blocks, and pending events. Also the block
ledger, and the detection of sequences that a gateway has lost."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterator
from operator import attrgetter

from baton.errors import BatonError
from baton.events import Failed, SequenceEvent
from engine.interface import EngineSpec
from engine.kv.lease import BlockLease
from engine.kv.ledger import BlockLedger, BlockOwner, take_ledger
from engine.kv.pool import BlockPool
from worker_core.beam_group import BeamGroup
from worker_core.commands import KnownSequences, StreamEvent
from worker_core.sequence import Stage, WorkerSequence
from worker_core.swap import SwapSpace

#: A unit of the batch.
SequenceGroup = WorkerSequence | BeamGroup

_rank_of = attrgetter("rank")


class CoreState:
    """State shared by the parts of the core, in the engine loop's thread.

    Each block is held by a sequence's lease, or its KV by the swap space, until the sequence
    leaves.
    """

    def __init__(
        self,
        spec: EngineSpec,
        pool: BlockPool,
        swap: SwapSpace,
        clock: Callable[[], float],
        on_forget: Callable[[Hashable], None] | None = None,
    ) -> None:
        """clock: monotonic seconds. on_forget: called with the key of each sequence that has
        left."""
        self._on_forget = on_forget
        self.spec = spec
        self.pool = pool
        self.swap = swap
        self.clock = clock
        self.served_prefixes: dict[Hashable, BlockLease] = {}
        """Leases of prefixes being sent to workers that fetch them, by the sender's keys."""
        self.groups: dict[Hashable, SequenceGroup] = {}
        """Groups by SequenceKey. Changed by `put` and `forget` only."""
        self._by_rank: list[SequenceGroup] = []
        """The same groups, best rank first, because each step is planned in this order."""
        self.num_places = 0
        """Batch places taken or reserved: the sum of all widths."""
        self.num_growing_places = 0
        """Batch places that allocate more blocks as outputs grow."""
        self.num_decoding = 0
        """Places that decoded in the last planned step; not recounted at each admission."""
        self._events: list[StreamEvent] = []

    @property
    def num_spare_blocks(self) -> int:
        """Blocks that are not kept for running sequences to grow."""
        return max(0, self.pool.num_available - self.num_growing_places)

    @property
    def leases(self) -> Iterator[BlockLease]:
        """All leases."""
        yield from self.served_prefixes.values()
        for group in self.groups.values():
            yield from group.leases

    def in_stage(self, stage: Stage) -> list[SequenceGroup]:
        """Groups in a stage, best rank first."""
        return [group for group in self._by_rank if group.stage is stage]

    def group_of(self, stream: int, handle: int) -> WorkerSequence | None:
        """The sequence before its fork that has `handle` as a further handle; else None."""
        for group in self.groups.values():
            if not isinstance(group, WorkerSequence) or group.stream != stream:
                continue
            if 0 < handle - group.handle < group.spec.num_choices:
                return group
        return None

    def put(self, group: SequenceGroup) -> None:
        """Add a group, or replace the one with its key."""
        before = self.groups.get(group.key)
        if before:
            self.forget(before)
        self.groups[group.key] = group
        insort(self._by_rank, group, key=_rank_of)
        self.num_places += group.width
        self.num_growing_places += group.num_growing_places

    def forget(self, group: SequenceGroup) -> None:
        """Remove a group. Its blocks are released by others."""
        del self.groups[group.key]
        place = bisect_left(self._by_rank, group.rank, key=_rank_of)
        # Sequences of two gateways may have equal ranks.
        del self._by_rank[self._by_rank.index(group, place)]
        self.num_places -= group.width
        self.num_growing_places -= group.num_growing_places
        if self._on_forget:
            self._on_forget(group.key)

    def emit(self, group: SequenceGroup, event: SequenceEvent) -> None:
        handle = group.handle
        if isinstance(group, WorkerSequence):
            handle += group.reporting_choice or 0
        self._events.append(StreamEvent(group.stream, handle, event))

    def emit_at(self, stream: int, handle: int, event: SequenceEvent) -> None:
        self._events.append(StreamEvent(stream, handle, event))

    def take_events(self) -> list[StreamEvent]:
        """Return and clear the pending events."""
        events, self._events = self._events, []
        return events

    def fail(self, group: SequenceGroup, error: BatonError) -> None:
        self.emit(group, failed(error))
        self.leave(group)

    def leave(self, group: SequenceGroup) -> None:
        """Release the blocks; computed KV stays in the prefix cache until evicted.

        If blocks may still be written or read, the sequence is closing, and leaves again once that
        has ended.
        """
        if isinstance(group, BeamGroup):
            self.forget(group)
            group.release()
            return
        if group.stage is Stage.SWAPPED:
            self.forget(group)
            self.swap.drop(group.key)
            return
        if group.ticket_id is None:
            self.swap.drop(group.key)
        if group.fetch:
            group.fetch.cancel()
            group.fetch = None
        if group.stage not in (Stage.COPYING, Stage.CLOSING):
            group.lease.index(group.token_ids, group.num_computed_tokens)
        if group.is_busy:
            group.stage = Stage.CLOSING
            return
        self.forget(group)
        group.lease.release()


def failed(error: BatonError) -> Failed:
    return Failed(error.reason, error.message, is_retriable=error.retry_after_s is not None)


def ledger_of(state: CoreState) -> BlockLedger:
    """Ledger of all blocks. Owners: the leases of all sequences, and prefixes being sent."""
    owners = [
        BlockOwner(
            request_id=group.spec.request_id,
            choice=group.spec.choice,
            stage=group.stage.name.lower(),
            ticket_id=(isinstance(group, WorkerSequence) and group.ticket_id) or 0,
            block_ids=tuple(lease.held_block_ids),
        )
        for group in state.groups.values()
        for lease in group.leases
    ]
    served = [
        BlockOwner(str(key), 0, "served_prefix", 0, tuple(lease.held_block_ids))
        for key, lease in state.served_prefixes.items()
    ]
    return take_ledger(state.pool, (*owners, *served))


def orphans_of(state: CoreState, known: KnownSequences) -> list[SequenceGroup]:
    """Sequences of a stream that its gateway neither tracks nor has ended."""
    return [
        group
        for group in state.groups.values()
        if group.stream == known.stream
        and group.stage is not Stage.CLOSING
        and known.handles.isdisjoint(range(group.handle, group.handle + width_of_handles(group)))
    ]


def width_of_handles(group: SequenceGroup) -> int:
    """Number of consecutive handles of a group."""
    return group.spec.num_choices if isinstance(group, WorkerSequence) else group.width

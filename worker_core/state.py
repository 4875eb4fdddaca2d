"""What a worker holds: its sequences and beams, their blocks, and the events that are still to be
reported."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from operator import attrgetter

from baton.cache.pool import BlockLease, BlockPool
from baton.engine.interface import EngineSpec
from baton.errors import BatonError
from baton.events import Failed, SequenceEvent
from baton.types import SequenceSpec
from worker_core.beam_group import BeamGroup
from worker_core.commands import StreamEvent
from worker_core.sequence import Stage, WorkerSequence
from worker_core.swap import SwapSpace

#: What takes part in the batch as one.
SequenceGroup = WorkerSequence | BeamGroup

_rank_of = attrgetter("rank")


class CoreState:
    """Shared by the parts of the core, in the engine loop's thread.

    Every block is held by a sequence's lease, or its KV by the swap space, until the sequence
    leaves.
    """

    def __init__(
        self,
        spec: EngineSpec,
        pool: BlockPool,
        swap: SwapSpace,
        on_forget: Callable[[str], None] = lambda _key: None,
    ) -> None:
        """on_forget: called with the key of each sequence that is here no longer."""
        self._on_forget = on_forget
        self.spec = spec
        self.pool = pool
        self.swap = swap
        self.served_prefixes: dict[str, BlockLease] = {}
        """What is being sent to workers that fetch it, by the sender's keys."""
        self._groups: dict[tuple[int, int], SequenceGroup] = {}
        self._by_rank: list[SequenceGroup] = []
        """The same, best rank first: kept so, because each step is planned in this order."""
        self.num_places = 0
        """Places in the batch that are taken or spoken for: the widths of all."""
        self.num_growing_places = 0
        """Those of them that take further blocks as their outputs grow: of sequences without a
        destination."""
        self.num_decoding = 0
        """Those that got a token in each step, when the last one was planned. Not counted anew for
        each that comes in."""
        self._events: list[StreamEvent] = []

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(self._groups.values())

    @property
    def leases(self) -> Iterator[BlockLease]:
        """All there are."""
        yield from self.served_prefixes.values()
        for group in self:
            yield from group.leases

    def in_stage(self, stage: Stage) -> list[SequenceGroup]:
        """Best rank first."""
        return [group for group in self._by_rank if group.stage is stage]

    def find(self, stream: int, handle: int) -> SequenceGroup | None:
        """The group whose first handle this is."""
        return self._groups.get((stream, handle))

    def by_key(self, key: str) -> SequenceGroup | None:
        """The group of a KV sender's key."""
        stream, _, handle = key.partition("/")
        return self._groups.get((int(stream), int(handle))) if handle else None

    def group_of(self, stream: int, handle: int) -> WorkerSequence | None:
        """The sequence of several choices, not forked yet, that `handle` is a further one of."""
        for group in self:
            if not isinstance(group, WorkerSequence) or group.stream != stream:
                continue
            if 0 < handle - group.handle < group.spec.num_choices:
                return group
        return None

    def put(self, group: SequenceGroup) -> None:
        """Take a group in, or in place of the one whose handle it has."""
        before = self._groups.get((group.stream, group.handle))
        if before:
            self._take_out(before)
        self._groups[group.stream, group.handle] = group
        insort(self._by_rank, group, key=_rank_of)
        self._count_places(group, group.width)

    def forget(self, group: SequenceGroup) -> None:
        """Take a group out whose blocks others hold now."""
        self._take_out(group)
        self._on_forget(group.key)

    def _take_out(self, group: SequenceGroup) -> None:
        del self._groups[group.stream, group.handle]
        place = bisect_left(self._by_rank, group.rank, key=_rank_of)
        # Sequences of two gateways may have the same rank.
        del self._by_rank[self._by_rank.index(group, place)]
        self._count_places(group, -group.width)

    def _count_places(self, group: SequenceGroup, num_more: int) -> None:
        self.num_places += num_more
        if isinstance(group, BeamGroup) or not group.destination:
            self.num_growing_places += num_more

    def shares_prefixes(self, spec: SequenceSpec) -> bool:
        return self.spec.shares_prefixes(len(spec.prompt_token_ids))

    def emit(self, group: SequenceGroup, event: SequenceEvent) -> None:
        handle = group.handle
        if isinstance(group, WorkerSequence):
            handle += group.reporting_choice or 0
        self._events.append(StreamEvent(group.stream, handle, event))

    def emit_at(self, stream: int, handle: int, event: SequenceEvent) -> None:
        self._events.append(StreamEvent(stream, handle, event))

    def take_events(self) -> list[StreamEvent]:
        """All events since the last call."""
        events, self._events = self._events, []
        return events

    def fail(self, group: SequenceGroup, error: BatonError) -> None:
        self.emit(group, failed(error))
        self.leave(group)

    def leave(self, group: SequenceGroup) -> None:
        """Give the blocks back; what was computed stays findable as a prefix until the memory is
        needed.

        Blocks that somebody may still write or read are given back when he is done, and the
        sequence leaves again.
        """
        if isinstance(group, BeamGroup):
            self.forget(group)
            group.release()
            return
        if group.stage is Stage.SWAPPED:
            self.forget(group)
            self.swap.drop(group.key)
            return
        if group.stage is not Stage.CLOSING:
            group.lease.index(group.token_ids, group.num_computed_tokens)
        if group.is_busy:
            group.stage = Stage.CLOSING
            return
        self.forget(group)
        group.lease.release()


def failed(error: BatonError) -> Failed:
    return Failed(error.reason, error.message, is_retriable=error.retry_after_s is not None)

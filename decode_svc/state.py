"""What a decode worker holds: its sequences and beams, their blocks, and the events that are still to be told."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from operator import attrgetter

from baton.cache.pool import BlockLease, BlockPool
from baton.engine.interface import EngineSpec
from baton.errors import BatonError
from baton.events import DecodeEvent, Failed
from baton.types import SequenceSpec
from decode_svc.beam_group import BeamGroup
from decode_svc.commands import StreamEvent
from decode_svc.sequence import DecodeSequence, Stage
from decode_svc.swap_space import SwapSpace

#: What takes part in the batch as one.
Member = DecodeSequence | BeamGroup

_rank_of = attrgetter("rank")


class DecodeState:
    """Shared by the parts of the core, in the engine loop's thread.

    Every block is held by a member's lease, or its KV by the swap space, until the member leaves.
    """

    def __init__(
        self,
        spec: EngineSpec,
        pool: BlockPool,
        swap: SwapSpace,
        on_forget: Callable[[str], None] = lambda _key: None,
    ) -> None:
        """on_forget: hears the key of each member that is here no longer."""
        self._on_forget = on_forget
        self.spec = spec
        self.pool = pool
        self.swap = swap
        self.loans: dict[str, BlockLease] = {}
        """What is being sent to borrowers, by the sender's keys."""
        self._members: dict[tuple[int, int], Member] = {}
        self._by_rank: list[Member] = []
        """The same, best rank first: kept so, because each step is planned in this order."""
        self.num_places = 0
        """Places in the batch that are taken or spoken for: the members' widths."""
        self.num_decoding = 0
        """Members that got a token in each step, when the last one was planned. Not counted anew for each that comes in."""
        self._events: list[StreamEvent] = []

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    @property
    def leases(self) -> Iterator[BlockLease]:
        """All there are."""
        yield from self.loans.values()
        for member in self:
            yield from member.leases

    def in_stage(self, stage: Stage) -> list[Member]:
        """Best rank first."""
        return [member for member in self._by_rank if member.stage is stage]

    def find(self, stream: int, handle: int) -> Member | None:
        """The member whose first handle this is."""
        return self._members.get((stream, handle))

    def group_of(self, stream: int, handle: int) -> DecodeSequence | None:
        """The sequence of several choices, not parted yet, that `handle` is a further one of."""
        for member in self:
            if not isinstance(member, DecodeSequence) or member.stream != stream:
                continue
            if 0 < handle - member.handle < member.spec.num_choices:
                return member
        return None

    def put(self, member: Member) -> None:
        """Take a member in, or in place of the one whose handle it has."""
        before = self._members.get((member.stream, member.handle))
        if before:
            self._take_out(before)
        self._members[member.stream, member.handle] = member
        insort(self._by_rank, member, key=_rank_of)
        self.num_places += width(member.spec)

    def forget(self, member: Member) -> None:
        """Take a member out whose blocks others hold now."""
        self._take_out(member)
        self._on_forget(member.key)

    def _take_out(self, member: Member) -> None:
        del self._members[member.stream, member.handle]
        place = bisect_left(self._by_rank, member.rank, key=_rank_of)
        # Sequences of two gateways may have the same rank.
        del self._by_rank[self._by_rank.index(member, place)]
        self.num_places -= width(member.spec)

    def shares_prefixes(self, spec: SequenceSpec) -> bool:
        return self.spec.shares_prefixes(len(spec.prompt_token_ids))

    def emit(self, member: Member, event: DecodeEvent) -> None:
        self._events.append(StreamEvent(member.stream, member.handle, event))

    def tell(self, stream: int, handle: int, event: DecodeEvent) -> None:
        self._events.append(StreamEvent(stream, handle, event))

    def take_events(self) -> list[StreamEvent]:
        """All events since the last call."""
        events, self._events = self._events, []
        return events

    def fail(self, member: Member, error: BatonError) -> None:
        self.emit(member, failed(error))
        self.leave(member)

    def leave(self, member: Member) -> None:
        """Give the blocks back; what was computed stays findable as a prefix until the memory is needed.

        Blocks that a launch in flight writes are given back when it is collected, and it leaves again.
        """
        if isinstance(member, DecodeSequence) and member.num_launched_tokens:
            member.lease.index(member.token_ids, member.num_computed_tokens)
            member.stage = Stage.ABANDONED
            return
        self.forget(member)
        if isinstance(member, BeamGroup):
            member.release()
        elif member.stage is Stage.SWAPPED:
            self.swap.drop(member.key)
        else:
            if member.stage in (Stage.RUNNING, Stage.PAUSED, Stage.MOVING):
                member.lease.index(member.token_ids, member.num_computed_tokens)
            member.lease.release()


def width(spec: SequenceSpec) -> int:
    """Places in the batch that a sequence takes, or its choices or beams will take."""
    return spec.sampling.beam.width if spec.sampling.beam else spec.num_choices


def failed(error: BatonError) -> Failed:
    return Failed(error.reason, error.message, is_retriable=error.retry_after_s is not None)

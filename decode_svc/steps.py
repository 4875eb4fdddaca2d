"""Steps of a decode worker: what was granted becomes a batch, the engine computes it, and the samples become tokens.

A step may be launched while the one before it is still computed, so that the device does not wait while tokens are handed
out. What it begins with then is not known here yet: the device takes it from the launch before (SequenceSlice.follows). This is
done if nothing but KV depends on those tokens, of any member of the step; every other step begins when the one before is
collected.

    plan n+1 --> launch n+1 --> collect n --> hand out its tokens --> plan n+2 ...

Between the core's steps at most one launch is in flight. Whoever moves, swaps or preempts sequences collects it first. What is
known of a sequence is as of the last collect. A sequence that is over while a launch still writes its blocks keeps them until
that is collected, and what it drew for it is thrown away. So is a whole launch if it fails, or the one before it does: its sequences
are as they were, and the next step is run alone, where the fault is charged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.cache.pool import BlockCopy
from baton.engine.guard import SliceOutcome, forward_guarded, try_collect, try_launch
from baton.engine.interface import Batch, Engine, Launched, SequenceSlice
from baton.errors import BatonError
from baton.types import Sample
from decode_svc.beam_group import BeamGroup
from decode_svc.costs import Costs
from decode_svc.drafting import Drafting, Drafts
from decode_svc.grammars import follow_grammars
from decode_svc.output import Output
from decode_svc.sequence import DecodeSequence, Stage
from decode_svc.state import DecodeState, Member

#: Who computes how many new tokens.
Grants = Sequence[tuple[Member, int]]


@dataclass(frozen=True, slots=True)
class _Flight:
    """A launch that is not collected. begin_s: when it was launched."""

    launched: Launched
    grants: tuple[tuple[DecodeSequence, int], ...]
    size: _StepSize
    begin_s: float


@dataclass(frozen=True, slots=True)
class _StepSize:
    """New tokens of a step: of sequences that decode, drafts and beams among them, and of prompts."""

    num_decode_tokens: int
    num_prefill_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.num_decode_tokens + self.num_prefill_tokens


class Steps:
    """Runs steps on an engine, one or two at a time."""

    def __init__(
        self,
        state: DecodeState,
        engine: Engine,
        drafting: Drafting,
        costs: Costs,
        clock: Callable[[], float],
        beat: Callable[[int], None],
        max_num_launches: int,
    ) -> None:
        """max_num_launches: 1, or 2 to launch ahead. clock, beat: see DecodeDevices."""
        self._state = state
        self._engine = engine
        self._drafting = drafting
        self._costs = costs
        self._clock = clock
        self._beat = beat
        self._launches_ahead = max_num_launches > 1
        self._output = Output(state)
        self._flight: _Flight | None = None
        self._has_failed = False
        """Whether the last launch failed: the next step is run alone."""
        self._collected_s = 0.0
        self.num_steps = 0
        """Steps that were collected."""

    def may_launch(self, running: Sequence[Member]) -> bool:
        """Whether a step of these may be launched before the one before it is collected, and be in flight itself."""
        return (
            self._launches_ahead
            and not self._has_failed
            and all(member.runs_ahead for member in running)
        )

    def run(self, granted: Grants) -> bool:
        """Compute what was granted, as far as there are blocks, when nothing is in flight. Whether there was anything to do."""
        grants, copies = self._with_room(follow_grammars(self._state, granted))
        if not grants:
            return False
        self._has_failed = False
        drafts, more_copies = self._drafting.start(grants)
        self._copy(copies + more_copies)
        parts = [_slices(member, num_new, drafts) for member, num_new in grants]
        batch = Batch(tuple(part for own in parts for part in own))
        size = _size(grants, batch)
        self._beat(size.num_tokens)
        begin_s = self._clock()
        outcomes = iter(forward_guarded(self._engine, batch, self._beats_of(size)))
        self._note(size, begin_s)
        for (member, num_new), own in zip(grants, parts, strict=True):
            self._advance(member, num_new, [next(outcomes) for _ in own], drafts)
        self._drafting.end(drafts)
        return True

    def launch(self, granted: Grants) -> bool:
        """Launch what was granted, as far as there are blocks; collect what was in flight. Whether there was anything to do."""
        able, copies = self._with_room(granted)
        grants = tuple((m, num_new) for m, num_new in able if isinstance(m, DecodeSequence))
        if not grants:
            return self.collect()
        self._copy(copies)
        parts = [member.slices(num_new, None)[0] for member, num_new in grants]
        batch = Batch(tuple(parts))
        size = _size(grants, batch)
        self._beat(size.num_tokens)
        begin_s = self._clock()
        launched = try_launch(self._engine, batch, self._beats_of(size))
        before, self._flight = self._flight, None
        if launched is None:
            self._has_failed = True
        else:
            self._flight = _Flight(launched, grants, size, begin_s)
            _take_off(grants, parts)
        if before:
            self._land(before)
        return True

    def collect(self) -> bool:
        """Wait for what is in flight, and hand out its tokens. Whether anything was."""
        flight, self._flight = self._flight, None
        if flight:
            self._land(flight)
        return flight is not None

    def _land(self, flight: _Flight) -> None:
        """Hand out what a launch drew; or throw it away, and what was launched after it, if it failed."""
        self._beat(flight.size.num_tokens)
        outcomes = try_collect(flight.launched)
        self._note(flight.size, max(flight.begin_s, self._collected_s))
        for member, num_new in flight.grants:
            member.landed(num_new)
        if outcomes is None:
            self._throw_away(flight)
            return
        for (member, num_new), samples in zip(flight.grants, outcomes, strict=True):
            self._settle(member, num_new, samples)

    def _settle(self, member: DecodeSequence, num_new: int, samples: tuple[Sample, ...]) -> None:
        if member.stage is not Stage.ABANDONED:
            self._output.advance(member, num_new, samples)
        else:
            self._state.leave(member)

    def _throw_away(self, failed: _Flight) -> None:
        """A launch failed, whose sequences have landed: no launch after it counts."""
        self._has_failed = True
        over = [member for member, _ in failed.grants]
        after, self._flight = self._flight, None
        if after:
            try_collect(after.launched)
            for member, num_new in after.grants:
                member.landed(num_new)
            over += [member for member, _ in after.grants]
        for member in dict.fromkeys(over):
            if member.stage is Stage.ABANDONED:
                self._state.leave(member)

    def _note(self, size: _StepSize, begin_s: float) -> None:
        """A step is over that the engine was at since `begin_s`."""
        self.num_steps += 1
        self._collected_s = self._clock()
        seconds = self._collected_s - begin_s
        self._costs.observe_step(size.num_decode_tokens, size.num_prefill_tokens, seconds)

    def _beats_of(self, size: _StepSize) -> Callable[[int, int], None]:
        num_tokens = size.num_tokens
        return lambda _first, _count: self._beat(num_tokens)

    def _with_room(self, granted: Grants) -> tuple[list[tuple[Member, int]], tuple[BlockCopy, ...]]:
        """The grants whose tokens there are blocks for, and what must be copied before they are written."""
        grants: list[tuple[Member, int]] = []
        copies: list[BlockCopy] = []
        for grant in granted:
            member, num_new = grant
            prepared = member.prepare(num_new)
            if prepared is not None:
                copies += prepared
                grants.append(grant)
        return grants, tuple(copies)

    def _copy(self, copies: Sequence[BlockCopy]) -> None:
        if copies:
            self._engine.kv.copy_blocks([c.source for c in copies], [c.target for c in copies])

    def _advance(
        self, member: Member, num_new: int, outcomes: Sequence[SliceOutcome], drafts: Drafts
    ) -> None:
        """Give a member what its slices came to."""
        if isinstance(member, BeamGroup):
            self._output.advance_beams(member, outcomes)
            return
        own = drafts.get(member.key) if drafts else None
        if own and isinstance(outcomes[0], BatonError):
            self._drafting.withhold(member)
        else:
            self._output.advance(member, num_new, outcomes[0], own.token_ids if own else ())


def _size(grants: Grants, batch: Batch) -> _StepSize:
    num_prefill = sum(num_new for member, num_new in grants if member.is_prefilling)
    return _StepSize(batch.num_tokens - num_prefill, num_prefill)


def _take_off(grants: Sequence[tuple[DecodeSequence, int]], parts: Sequence[SequenceSlice]) -> None:
    """Tell sequences that they are in flight, and which rows of the launch, over all its slices, draw for them."""
    num_rows = 0
    for (member, num_new), part in zip(grants, parts, strict=True):
        member.launched(num_new, num_rows if part.rows else None)
        num_rows += len(part.rows)


def _slices(member: Member, num_new: int, drafts: Drafts) -> tuple[SequenceSlice, ...]:
    if isinstance(member, BeamGroup):
        return member.slices()
    return member.slices(num_new, drafts.get(member.key) if drafts else None)

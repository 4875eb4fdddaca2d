"""Steps: builds a batch from grants, runs it on the engine, and turns samples into tokens.

A step may be launched while the previous one is computed, so that the device does not idle during
post-processing. Its first tokens are then unknown here, and the device takes them from the previous
launch (SequenceSlice.follows). This requires that only KV depends on those tokens, for all groups
of the step; otherwise the step starts after the previous one is collected. Prompts that leave after
their first token need no such token: their chunks are launched back to back. A chunk's KV is passed
to the sender once the previous launch, which it depends on, has succeeded, and is sent as the
device computes it.

    plan n+1 --> launch n+1 --> collect n --> emit its tokens --> plan n+2 ...

Between the core's steps at most one launch is in flight. In a pipeline of several stages there may
be one fewer than stages, so that each stage computes another launch. None follows another: prompts
go on chunk by chunk, and the sequences whose last token is known are divided among launches.

Handoff, swap and preemption collect all launches first. Sequence state is as of the last collect. A
sequence that ends while a launch writes its blocks keeps them until that launch is collected, and
its samples are discarded. A launch is discarded as a whole if it fails, or if one before it fails:
its sequences stay as they were, and the next step runs alone, to attribute the fault.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from baton.errors import BatonError
from baton.events import ChunkTime
from engine.interface import (
    Batch,
    Engine,
    Launched,
    LayersDone,
    SequenceSlice,
    forward_guarded,
    try_collect,
    try_launch,
)
from engine.kv.interface import KvPool
from engine.kv.lease import BlockCopy
from worker_core.beam_group import BeamGroup
from worker_core.costs import Costs
from worker_core.drafting import Drafting
from worker_core.handoff import Handoffs
from worker_core.output import OutputProcessor
from worker_core.sequence import Stage, WorkerSequence
from worker_core.state import CoreState, SequenceGroup

#: (group, new tokens) to compute.
Grants = Sequence[tuple[SequenceGroup, int]]


@dataclass(frozen=True, slots=True)
class _InFlightStep:
    """A launch in flight. begin_s: time of the launch."""

    launched: Launched
    kv_sends: _KvSends
    grants: tuple[tuple[WorkerSequence, int], ...]
    size: _StepSize
    begin_s: float


@dataclass(frozen=True, slots=True)
class _StepSize:
    """Size of a step: new tokens of decoding sequences (with drafts and beams) and of prompts, and
    the number of decoding sequences."""

    num_tokens: int
    num_prefill_tokens: int
    num_decoding: int


class _KvSends:
    """Passes the KV of prompts to the sender during a step: a whole chunk after its last layer, a
    prompt's last chunk by layer groups.

    is_held: whether a previous launch, which this step's KV depends on, may still fail.
    """

    def __init__(
        self, handoffs: Handoffs, kv: KvPool, beat: Callable[[], None], grants: Grants
    ) -> None:
        """beat: signals progress of the step. grants: before `launched` is called for them."""
        self._handoffs = handoffs
        self._kv = kv
        self._beat = beat
        self._chunks = [
            (group, range(start, start + num_new), num_new == group.num_missing_tokens)
            for group, num_new in grants
            if isinstance(group, WorkerSequence) and group.is_leaving
            for start in (group.next_position,)
        ]
        self._held: list[tuple[WorkerSequence, range, range, object]] = []
        self.is_held = False

    def layers_done(self, first_layer: int, num_layers: int) -> None:
        """Pass on the KV of layers computed for all slices; see LayersDone."""
        self._beat()
        if not self._chunks:
            return
        self._handoffs.heartbeat()
        mark = self._kv.mark()
        layers = range(first_layer, first_layer + num_layers)
        all_layers = range(self._kv.layout.num_layers)
        for group, tokens, is_last in self._chunks:
            if is_last:
                self._held.append((group, tokens, layers, mark))
            elif layers.stop == all_layers.stop:
                self._held.append((group, tokens, all_layers, mark))
        if not self.is_held:
            self.release()

    def release(self) -> None:
        """All previous launches have succeeded: pass on held KV."""
        self.is_held = False
        held, self._held = self._held, []
        for one in held:
            self._handoffs.send_computed(*one)

    def drop(self) -> None:
        """A previous launch has failed: discard this step's KV."""
        self._chunks = []
        self._held = []


class Steps:
    """Runs steps on an engine, up to max_num_launches at a time."""

    def __init__(
        self,
        state: CoreState,
        engine: Engine,
        drafting: Drafting,
        costs: Costs,
        handoffs: Handoffs,
        output: OutputProcessor,
        beat: Callable[[int], None],
        max_num_launches: int,
    ) -> None:
        """max_num_launches: 1 to launch none ahead. beat: see CoreDeps."""
        self._state = state
        self._engine = engine
        self._drafting = drafting
        self._costs = costs
        self._handoffs = handoffs
        self._beat = beat
        self._max_num_launches = max_num_launches
        self._is_pipelined = engine.spec.is_pipelined
        self._output = output
        self._in_flight: deque[_InFlightStep] = deque()
        self._has_failed = False
        """Whether the last launch failed; the next step then runs alone."""
        self._collected_s = 0.0
        self._has_decoded = False
        """Whether the last step computed next tokens, so that the gap to the next step counts."""
        self.num_steps = 0
        """Number of collected steps."""

    def may_launch(self, running: Sequence[SequenceGroup]) -> bool:
        """Whether a step of these may be launched before the previous one is collected."""
        if self._max_num_launches == 1 or self._has_failed:
            return False
        if self._is_pipelined:
            return all(isinstance(group, WorkerSequence) for group in running)
        return all(group.runs_ahead for group in running)

    @property
    def num_shares(self) -> int:
        """Concurrent launches that divide the running sequences among them."""
        return self._max_num_launches if self._is_pipelined else 1

    def in_flight_s(self) -> float:
        """Estimated seconds until all launches in flight have ended."""
        if not self._in_flight:
            return 0.0
        sizes = [step.size for step in self._in_flight]
        total_s = sum(
            self._costs.step_s(size.num_tokens - size.num_prefill_tokens, size.num_prefill_tokens)
            for size in sizes
        )
        begin_s = max(self._in_flight[0].begin_s, self._collected_s)
        return max(0.0, total_s - (self._state.clock() - begin_s))

    def ready(self, running: Sequence[SequenceGroup]) -> Sequence[SequenceGroup]:
        """Groups that the next launch may serve."""
        return [g for g in running if not g.is_drawing] if self._is_pipelined else running

    def run(self, granted: Grants) -> bool:
        """Run the granted step, as far as blocks allow, with nothing in flight. Return whether
        there was work."""
        grants, copies = self._with_room(self._with_grammar(granted))
        if not grants:
            self._has_decoded = False
            return False
        self._has_failed = False
        drafts, more_copies = self._drafting.start(grants)
        self._copy(copies)
        self._copy(more_copies)
        parts = [group.slices(num_new, drafts.get(group.key)) for group, num_new in grants]
        batch = Batch(tuple(part for own in parts for part in own))
        size = _size(grants, batch)
        beat = partial(self._beat, size.num_tokens)
        beat()
        begin_s = self._state.clock()
        owners = [grant for grant, own in zip(grants, parts, strict=True) for _ in own]

        def layers_done_of(slices: range) -> LayersDone:
            of_slices = [owners[index] for index in slices]
            return _KvSends(self._handoffs, self._engine.kv, beat, of_slices).layers_done

        outcomes = iter(forward_guarded(self._engine, batch, layers_done_of))
        self._note(size, grants, begin_s)
        for (group, num_new), own in zip(grants, parts, strict=True):
            came = [next(outcomes) for _ in own]
            if isinstance(group, BeamGroup):
                self._output.advance_beams(group, came)
                continue
            draft = drafts.get(group.key)
            if draft is None:
                self._output.advance(group, num_new, came[0])
            elif tokens := self._drafting.settle(group, draft, came):
                self._output.advance(group, num_new, tokens, draft.num_drafts)
        self._drafting.end(drafts)
        return True

    def launch(self, granted: Grants) -> bool:
        """Launch the granted step, as far as blocks allow, then collect the oldest one if there
        are max_num_launches, or nothing was granted. Return whether there was work."""
        able, copies = self._with_room(self._with_grammar(granted))
        grants = tuple((m, num_new) for m, num_new in able if isinstance(m, WorkerSequence))
        if not grants:
            return self._collect_oldest()
        self._copy(copies)
        parts = [group.slices(num_new, None)[0] for group, num_new in grants]
        batch = Batch(tuple(parts))
        size = _size(grants, batch)
        beat = partial(self._beat, size.num_tokens)
        beat()
        begin_s = self._state.clock()
        kv_sends = _KvSends(self._handoffs, self._engine.kv, beat, grants)
        kv_sends.is_held = bool(self._in_flight)
        launched = try_launch(self._engine, batch, kv_sends.layers_done)
        if launched is None:
            self._has_failed = True
            return True
        self._in_flight.append(_InFlightStep(launched, kv_sends, grants, size, begin_s))
        self._on_launched(grants, parts)
        if len(self._in_flight) == self._max_num_launches:
            self._collect_oldest()
        return True

    def _on_launched(
        self, grants: Sequence[tuple[WorkerSequence, int]], parts: Sequence[SequenceSlice]
    ) -> None:
        """Mark sequences as in flight. Records the rows, counted over all slices of the launch,
        that sample for them."""
        num_rows, max_model_len = 0, self._state.spec.max_model_len
        for (group, num_new), part in zip(grants, parts, strict=True):
            draws = part.rows and part.rows[-1].scored_token_id is None
            group.launched(num_new, num_rows if draws else None, max_model_len)
            num_rows += len(part.rows)

    def collect(self) -> bool:
        """Wait for the launches in flight and emit their tokens. Return whether there was one."""
        has_any = self._collect_oldest()
        while self._collect_oldest():
            pass
        return has_any

    def _collect_oldest(self) -> bool:
        """Wait for the first of the launches in flight and emit its tokens. Return whether there
        was one."""
        if not self._in_flight:
            return False
        self._process_outcomes(self._in_flight.popleft())
        if self._in_flight:
            self._in_flight[0].kv_sends.release()
        return True

    def _process_outcomes(self, step: _InFlightStep) -> None:
        """Emit the tokens of a launch. If it failed, discard it and the launches after it."""
        self._beat(step.size.num_tokens)
        outcomes = try_collect(step.launched)
        begin_s = max(step.begin_s, self._collected_s)
        self._note(step.size, step.grants if outcomes is not None else (), begin_s)
        for group, num_new in step.grants:
            group.collected(num_new)
        if outcomes is None:
            self._discard(step)
            return
        for (group, num_new), samples in zip(step.grants, outcomes, strict=True):
            if group.stage is Stage.CLOSING:
                self._state.leave(group)
            else:
                self._output.advance(group, num_new, samples)

    def _discard(self, failed: _InFlightStep) -> None:
        """Discard the launches after a failed one."""
        self._has_failed = True
        over = [group for group, _ in failed.grants]
        while self._in_flight:
            after = self._in_flight.popleft()
            after.kv_sends.drop()
            try_collect(after.launched)
            for group, num_new in after.grants:
                group.collected(num_new)
            over += [group for group, _ in after.grants]
        for group in dict.fromkeys(over):
            if group.stage is Stage.CLOSING:
                self._state.leave(group)

    def _note(self, size: _StepSize, grants: Grants, begin_s: float) -> None:
        """Record an ended step that started at `begin_s`. grants: source of the prompt chunks to
        record."""
        self.num_steps += 1
        before_s, self._collected_s = self._collected_s, self._state.clock()
        seconds = self._collected_s - begin_s
        gap_s = self._collected_s - before_s if self._has_decoded else seconds
        num_decode_tokens = size.num_tokens - size.num_prefill_tokens
        self._has_decoded = num_decode_tokens > 0
        self._costs.observe_step(num_decode_tokens, size.num_prefill_tokens, seconds)
        if size.num_decoding:
            self._costs.observe_gaps(size.num_decoding, size.num_prefill_tokens, gap_s)
        for group, num_new in grants:
            if isinstance(group, WorkerSequence) and group.prefill:
                group.prefill.chunks.append(ChunkTime(begin_s, self._collected_s, num_new))

    def _with_grammar(self, granted: Grants) -> Grants:
        """Compute the allowed next tokens of granted sequences. Sequences without any fail and are
        left out."""
        able = []
        for grant in granted:
            group, _ = grant
            try:
                if group.matcher_future:
                    group.follow_grammar()
            except BatonError as error:
                if isinstance(group, WorkerSequence):
                    self._handoffs.cancel(group, error.reason, error.message)
                self._state.fail(group, error)
            else:
                able.append(grant)
        return able

    def _with_room(
        self, granted: Grants
    ) -> tuple[list[tuple[SequenceGroup, int]], tuple[BlockCopy, ...]]:
        """Grants that fit into the available blocks, and block copies to make before the step."""
        grants: list[tuple[SequenceGroup, int]] = []
        copies: list[BlockCopy] = []
        for grant in granted:
            group, num_new = grant
            prepared = group.prepare(num_new)
            if prepared is not None:
                copies += prepared
                grants.append(grant)
        return grants, tuple(copies)

    def _copy(self, copies: Sequence[BlockCopy]) -> None:
        if copies:
            self._engine.kv.copy_blocks([c.source for c in copies], [c.target for c in copies])


def _size(grants: Grants, batch: Batch) -> _StepSize:
    num_prefill = sum(num_new for group, num_new in grants if group.is_prefilling)
    num_decoding = sum(not group.is_prefilling for group, _ in grants)
    return _StepSize(batch.num_tokens, num_prefill, num_decoding)

"""State machine of a request, from the queue to its last token. Pure: events and the time in,
actions out.

A sequence reaches the worker that runs it, its owner, by one handoff, from any source of KV:

    WAITING ──placed──┐              ┌─Offered──> DELIVERING ──Committed──┐
                      ├─> RESERVING ─┤  its source sends KV by the ticket ├─> RUNNING ─tokens─> OVER
    PAUSING ──Paused──┘   opened at  └─LocalPrefill───────────────────────┘
                          the owner

    the source     a prefill worker, opened with the ticket, which computes the prompt; or
                   the origin, a worker that runs the sequence and hands it off: a migration,
                   which starts in PAUSING

    refused, preempted, failed, or too late, in any state:
        a migration     continues at its origin, if that still has the sequence; RETURNING until
                        the origin has answered
        else            the assignment is OVER; each choice WAITS for another one, with its
                        tokens so far

The choices of a request are one sequence until their first tokens, then fork. The source reports
the first tokens directly, perhaps before the owner does; choices fork only once the owner has the
KV. The outputs of a beam search fork at its end.

Events of source and owner arrive on separate streams, unordered. Events of the owner are held until
the source reports Prefilled. Once the owner has the KV, its events count without those of the
source.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import replace

from baton.commands import Abort, HandOff, Pause, Resume
from baton.errors import (
    BY_REASON,
    BatonError,
    Draining,
    EngineFault,
    FieldViolation,
    HandoffFailed,
    InvalidRequest,
    NoWorkers,
    RetriableError,
)
from baton.events import (
    Committed,
    Deferred,
    Failed,
    HandedOff,
    LocalPrefill,
    NotHandedOff,
    Offered,
    Paused,
    Preempted,
    Prefilled,
    SequenceEvent,
    Tokens,
    joined,
)
from baton.telemetry.names import Phase, RequestEvent
from baton.types import (
    KvSource,
    NumericsClass,
    Rank,
    SequenceSpec,
    Tier,
    TokenLogprobs,
    across_accounts,
)
from gateway.output.output import ChoiceOutput
from gateway.request.assignment import (
    AbortSource,
    Action,
    Assignment,
    Choice,
    Close,
    Deliver,
    EndMigration,
    Fail,
    NoteUndelivered,
    Open,
    OpenSource,
    Place,
    Released,
    Remember,
    SendCommand,
    SetTimer,
    State,
    Update,
)
from gateway.routing.placement import Outcome, Placement
from gateway.routing.router import Need
from gateway.telemetry.timing import Handoff, Timeline

#: Seconds for a worker to pause a sequence; later it continues there.
PAUSE_TIMEOUT_S = 10.0

#: Seconds for a worker to answer an opening. Covers lost messages; a frozen worker is detected
#: earlier.
OPEN_TIMEOUT_S = 15.0

#: Seconds for KV to reach the owner after it is all computed.
HANDOFF_TIMEOUT_S = 30.0

_NOTHING: tuple[Action, ...] = ()

#: States in which the owner holds nothing; events of it that arrive late are ignored.
_RELEASED = frozenset({State.RETURNING, State.OVER})


class RequestState:
    """State of one request. Every method except the properties handles an event and returns the
    actions to perform, in order."""

    def __init__(
        self,
        spec: SequenceSpec,
        outputs: Sequence[ChoiceOutput],
        timeline: Timeline,
        ended: Set[int] = frozenset(),
    ) -> None:
        """outputs: one per choice, with the tokens of earlier streams.
        timeline: of the request; all times are on its clock.
        ended: choices that ended in an earlier stream."""
        self.choices = tuple(Choice(i, output, i in ended) for i, output in enumerate(outputs))
        self._deliver = tuple((Deliver(choice),) for choice in self.choices)
        """Actions on a new token, by choice; made once."""
        has_begun = 0 in ended or bool(outputs[0].token_ids)
        self.prompt_logprobs: tuple[TokenLogprobs, ...] | None = () if has_begun else None
        """None until known; known before the first tokens if requested. Empty if an earlier stream
        sent them."""
        self.num_running = len(self.choices) - len(ended)
        """Choices that are not over; 0 once the request has failed."""
        self._spec = spec
        self._is_search = spec.sampling.beam is not None
        self._timeline = timeline
        self._assignments: dict[Assignment, None] = {}
        """Assignments that are not OVER, in order."""
        self._actions: list[Action] = []
        self._numerics: NumericsClass | None = None
        """Class of the worker of the first tokens, if it must not change."""
        self._is_return = False
        self._is_closed = False

    # Events from the driver

    def on_start(self, now_s: float) -> Sequence[Action]:
        for choice in self.choices:
            if choice.output.finish and not choice.is_over:
                self._end(choice)
        for group in self._grouped([choice for choice in self.choices if not choice.is_over]):
            self._wait(group, now_s)
        self._is_return = True
        return self._taken_actions()

    def on_place(
        self, assignment: Assignment, place: Placement | BatonError, now_s: float
    ) -> Sequence[Action]:
        """Handle the dispatcher's answer: a placement, or the error that prevents one."""
        if isinstance(place, BatonError):
            # The worker failure that led here is more specific than the dispatcher's error.
            failures = assignment.choices[0].failures
            self._fail(failures[-1] if isinstance(place, NoWorkers) and failures else place)
            return self._taken_actions()
        if assignment.state is not State.WAITING:  # given up meanwhile
            return (Update(place, Outcome.RELEASED),)
        assignment.placement = place
        self._timeline.queue_ms += (now_s - assignment.since_s) * 1e3
        self._timeline.note(RequestEvent.PLACED, now_s)
        self._timeline.name_workers(place.prefill_name, place.decode_name)
        self._open(assignment, now_s)
        return self._taken_actions()

    def on_event(  # noqa: PLR0912, one arm per event
        self, assignment: Assignment, number: int, event: SequenceEvent, now_s: float
    ) -> Sequence[Action]:
        """Handle an event of the owner, about one choice, or about all before they fork."""
        if assignment.is_streaming and type(event) is Tokens:
            if number in assignment.gone:
                return _NOTHING
            if event.num_draft_tokens:
                self._timeline.num_draft_tokens += event.num_draft_tokens
                self._timeline.num_accepted_tokens += event.num_accepted_tokens
            choice = assignment.choices[number]
            choice.pending.append(event)
            return self._deliver[choice.index]
        if assignment.state in _RELEASED:
            return _NOTHING
        match event:
            case Tokens():
                self._on_tokens(assignment, number, event, now_s)
            case Offered(ticket, num_cached_tokens):
                self._on_offered(assignment, ticket, num_cached_tokens, now_s)
            case LocalPrefill(num_cached_tokens):
                self._on_local_prefill(assignment, num_cached_tokens, now_s)
            case Prefilled():
                self._on_prefilled(assignment, event, now_s)
            case Committed(transfer_exposed_ms, transfer_bytes, checksum):
                placement, origin = _placement_of(assignment), assignment.origin
                source = _placement_of(origin).decode_name if origin else placement.prefill_name
                handoff = Handoff(source, placement.decode_name, transfer_bytes, checksum)
                self._timeline.on_committed(handoff, transfer_exposed_ms, now_s)
                self._on_kv(assignment, now_s)
                if not self._is_search:
                    self._fork(assignment)
            case Deferred(why) | Failed(Draining.reason, why):
                # No room after all, or the worker is draining: not a failure.
                self._timeline.note(RequestEvent.DEFERRED, now_s)
                self._actions.append(Update(_placement_of(assignment), Outcome.REFUSED))
                self._on_released(assignment, number, Deferred(why), now_s)
            case Preempted():
                self._timeline.note(RequestEvent.PREEMPTED, now_s)
                self._on_released(assignment, number, event, now_s)
            case Failed():
                self._on_released(assignment, number, _error_of(event), now_s)
            case Paused() | HandedOff() | NotHandedOff():
                self._on_origin_event(assignment, number, event, now_s)
        return self._taken_actions()

    def on_source_event(
        self, assignment: Assignment, number: int, event: SequenceEvent, now_s: float
    ) -> Sequence[Action]:
        """Handle an event of a prefill worker that is an assignment's source: Prefilled, then its
        first tokens."""
        state = assignment.state
        if state in _RELEASED:
            return _NOTHING
        match event:
            case Prefilled():
                self._on_prefilled(assignment, event, now_s)
                assignment.is_prefill_awaited = False
                if state is State.DELIVERING:
                    self._actions.append(SetTimer(assignment, HANDOFF_TIMEOUT_S))
                if self._is_search:
                    self._timeline.on_tokens(now_s)
                elif assignment.held:  # events of the owner that waited for this one
                    self._release_held(assignment, now_s)
            case Tokens():
                self._give(assignment, number, event, now_s)
            case HandedOff() if assignment.is_prefill_awaited:
                text = "a sequence was handed off before its prompt was reported as computed"
                self._fail(EngineFault(text))
            case NotHandedOff(reason, message):
                self._actions.append(AbortSource(assignment))
                error = _error_of(Failed(reason, message, is_retriable=True))
                self._on_source_failed(assignment, error, now_s)
            case Deferred(why) | Failed(Draining.reason, why) if state is State.DELIVERING:
                self._timeline.note(RequestEvent.DEFERRED, now_s)
                self._actions.append(Update(_placement_of(assignment), Outcome.REFUSED_BY_SOURCE))
                self._release_all(assignment, Deferred(why), now_s)
            case Failed():
                self._on_source_failed(assignment, _error_of(event), now_s)
            case Preempted() if state is State.DELIVERING:
                self._timeline.note(RequestEvent.PREEMPTED, now_s)
                self._release_all(assignment, event, now_s)
        return self._taken_actions()

    def on_timer(self, assignment: Assignment, now_s: float) -> Sequence[Action]:
        match assignment.state:
            case State.PAUSING:
                self._stay(assignment)
            case State.RESERVING:
                text = f"a worker did not answer an opening within {OPEN_TIMEOUT_S:g} s"
                self._release_all(assignment, HandoffFailed(text), now_s)
            case State.DELIVERING | State.RETURNING:
                late = HandoffFailed(f"a handoff took more than {HANDOFF_TIMEOUT_S:g} s")
                if assignment.origin is None:
                    self._release_all(assignment, late, now_s)
                else:
                    self._lose_both(assignment, late, now_s)
        return self._taken_actions()

    def on_migration(self, choice: Choice, placement: Placement, now_s: float) -> Sequence[Action]:
        """Migrate a movable choice to a claimed placement. EndMigration always follows."""
        origin, spec = choice.assignment, self.spec_of((choice,))
        if origin is None:
            raise ValueError("the choice has no place")
        migration = Assignment((choice,), State.PAUSING, now_s, spec, origin, placement)
        self._assignments[migration] = None
        choice.migration = migration
        self._actions.append(SendCommand(origin, origin.choices.index(choice), Pause()))
        self._actions.append(SetTimer(migration, PAUSE_TIMEOUT_S))
        return self._taken_actions()

    def on_delivery(self, choice: Choice) -> Sequence[Action]:
        """Add pending tokens to the choice's output, since the client can take more."""
        self._take_pending(choice)
        return self._taken_actions()

    def on_close(self) -> Sequence[Action]:
        """End the request, in any state."""
        self._close_all()
        return self._taken_actions()

    # Queries

    def is_movable(self, choice: Choice) -> bool:
        """Whether it runs as a forked sequence and no migration of it is under way."""
        assignment = choice.assignment
        return (
            assignment is not None
            and assignment.state is State.RUNNING
            and assignment.is_forked
            and choice.migration is None
            and not choice.is_over
        )

    def rank_of(self, choice: Choice) -> Rank:
        """Its rank among the running choices of all accounts."""
        return across_accounts(self._spec.choice_alone(choice.index).rank)

    def spec_of(self, choices: Sequence[Choice]) -> SequenceSpec:
        """The sequence to place: all choices as one before the first tokens, else a single
        choice."""
        spec = self._spec
        has_begun = self.prompt_logprobs is not None or choices[0].output.token_ids
        if has_begun and spec.sampling.prompt_logprobs >= 0:
            spec = replace(spec, sampling=replace(spec.sampling, prompt_logprobs=-1))
        if len(choices) > 1:
            return spec
        (choice,) = choices
        return spec.choice_alone(choice.index, tuple(choice.output.token_ids))

    # Events of the owner

    def _on_offered(
        self, assignment: Assignment, ticket: bytes, num_cached_tokens: int, now_s: float
    ) -> None:
        placement, origin = _placement_of(assignment), assignment.origin
        self._timeline.reserve_ms += (now_s - assignment.since_s) * 1e3
        self._on_answer(assignment, RequestEvent.OFFERED, num_cached_tokens, now_s)
        assignment.state, assignment.since_s = State.DELIVERING, now_s
        if origin is not None:
            self._actions.append(
                SendCommand(origin, origin.choices.index(assignment.choices[0]), HandOff(ticket))
            )
            self._actions.append(SetTimer(assignment, HANDOFF_TIMEOUT_S))
        elif placement.source_link is not None:
            assignment.is_prefill_awaited = True
            self._timeline.enter(Phase.PREFILL, now_s)
            self._actions.append(OpenSource(assignment, placement.source_link, ticket))
        else:
            text = "a ticket came for a sequence, but its owner computes the prompt itself"
            self._fail(EngineFault(text))

    def _on_local_prefill(
        self, assignment: Assignment, num_cached_tokens: int, now_s: float
    ) -> None:
        """The owner computes the missing KV; none is sent."""
        placement, timeline = _placement_of(assignment), self._timeline
        self._on_answer(assignment, RequestEvent.LOCAL_PREFILL, num_cached_tokens, now_s)
        timeline.on_local_prefill()
        if assignment.origin is None:
            num_missing_tokens = assignment.spec.num_tokens - num_cached_tokens
            if placement.bypasses_split(num_missing_tokens):
                num_bypassed_tokens = max(timeline.num_bypassed_tokens, num_missing_tokens)
                timeline.num_bypassed_tokens = num_bypassed_tokens
        if placement.source is not None:
            self._actions.append(Update(placement, Outcome.PREFILLED))
        self._on_kv(assignment, now_s)

    def _on_answer(
        self, assignment: Assignment, event: RequestEvent, num_cached_tokens: int, now_s: float
    ) -> None:
        placement = _placement_of(assignment)
        self._actions.append(SetTimer(assignment, None))
        self._actions.append(Update(placement, Outcome.RESERVED))
        if placement.decode is None:
            return  # the prefill worker's token completes the output
        self._timeline.note(event, now_s)
        if self._timeline.decode_cached_tokens is None:
            self._timeline.decode_cached_tokens = num_cached_tokens

    def _on_kv(self, assignment: Assignment, now_s: float) -> None:
        """The owner holds the KV or computes it: run there, and end a migration at its origin."""
        origin, assignment.origin = assignment.origin, None
        assignment.state, assignment.since_s = State.RUNNING, now_s
        self._actions.append(SetTimer(assignment, None))
        if origin is None:
            return
        placement, (choice,) = _placement_of(assignment), assignment.choices
        choice.assignment, choice.migration = assignment, None
        self._drop(origin, choice)
        self._timeline.name_workers(placement.prefill_name, placement.decode_name)
        self._timeline.note(RequestEvent.MOVED, now_s)
        self._actions.append(EndMigration(choice))

    def _on_tokens(self, assignment: Assignment, number: int, event: Tokens, now_s: float) -> None:
        self._timeline.num_draft_tokens += event.num_draft_tokens
        self._timeline.num_accepted_tokens += event.num_accepted_tokens
        if assignment.state is not State.RUNNING:
            self._on_kv(assignment, now_s)
        assignment.held.append((number, event))
        if self._is_search:
            if len(assignment.held) == len(assignment.choices):
                self._release_held(assignment, now_s)
            return
        self._fork(assignment)
        if not assignment.is_prefill_awaited:
            self._release_held(assignment, now_s)
            assignment.is_streaming = assignment.state is State.RUNNING

    def _release_held(self, assignment: Assignment, now_s: float) -> None:
        """Process held events."""
        held, assignment.held = assignment.held, []
        for number, event in held:
            if isinstance(event, Tokens):
                self._give(assignment, number, event, now_s)
            else:
                self._release(assignment, (number,), event, now_s)

    def _give(self, assignment: Assignment, number: int, event: Tokens, now_s: float) -> None:
        """Accept tokens for the client."""
        if number in assignment.gone:
            return
        self._timeline.on_tokens(now_s)
        self._timeline.has_forked = len(self.choices) > 1
        self._numerics = self._numerics or _placement_of(assignment).numerics
        choice = assignment.choices[number]
        choice.pending.append(event)
        self._actions += self._deliver[choice.index]

    def _fork(self, assignment: Assignment) -> None:
        """Give each choice its own handle at the owner, and end choices that are over there."""
        if assignment.is_forked:
            return
        assignment.is_forked = True
        for number in sorted(assignment.gone):
            self._end_one(assignment, number)

    # Events of the source

    def _on_prefilled(self, assignment: Assignment, event: Prefilled, now_s: float) -> None:
        timeline = self._timeline
        timeline.note(RequestEvent.PREFILLED, now_s)
        timeline.on_prefilled(event.queue_ms + event.compute_ms, now_s)
        timeline.prefill_queue_ms += event.queue_ms
        timeline.prefill_ms += event.compute_ms
        if timeline.cached_tokens is None:
            timeline.cached_tokens = event.num_cached_tokens
        if self.prompt_logprobs is None:
            self.prompt_logprobs = event.prompt_logprobs
        self._actions.append(Update(_placement_of(assignment), Outcome.PREFILLED))

    def _on_source_failed(self, assignment: Assignment, error: BatonError, now_s: float) -> None:
        """The source failed: the KV will not arrive, or its tokens are unknown."""
        if assignment.state is State.RUNNING and not assignment.is_prefill_awaited:
            return
        placement = _placement_of(assignment)
        if isinstance(error, HandoffFailed) and placement.source is not None:
            self._actions.append(NoteUndelivered(placement, placement.source, error.message))
        self._release_all(assignment, error, now_s)

    # Events of a migration's origin

    def _on_origin_event(
        self,
        origin: Assignment,
        number: int,
        event: Paused | HandedOff | NotHandedOff,
        now_s: float,
    ) -> None:
        if number in origin.gone:
            return
        migration = origin.choices[number].migration
        match event:
            case Paused():
                if migration is not None and migration.state is State.PAUSING:
                    self._actions.append(SetTimer(migration, None))
                    self._open_migration(migration, now_s)
            case HandedOff():
                if migration is None:
                    text = "a sequence was handed off without an order"
                    self._release(origin, (number,), HandoffFailed(text), now_s)
                elif migration.failure is not None:
                    self._lose_both(migration, migration.failure, now_s)
                else:
                    migration.has_origin_left = True
            case NotHandedOff(_, message):
                if migration is None:
                    self._actions.append(SendCommand(origin, number, Resume()))
                    return
                if migration.state is State.DELIVERING:
                    sender, placement = _placement_of(origin).owner, _placement_of(migration)
                    self._actions.append(NoteUndelivered(placement, sender, message))
                self._stay(migration)

    def _open_migration(self, migration: Assignment, now_s: float) -> None:
        """Open the migration at its target, once the origin has reported all tokens."""
        (choice,) = migration.choices
        self._take_pending(choice)
        if migration.state is not State.OVER:
            migration.spec = self.spec_of((choice,))
            self._open(migration, now_s)

    def _stay(self, migration: Assignment) -> None:
        """Give up the migration; the choice continues at its origin."""
        origin, (choice,) = migration.origin, migration.choices
        self._end_migration(migration)
        if origin is not None:
            self._actions.append(SendCommand(origin, origin.choices.index(choice), Resume()))

    def _lose_both(self, migration: Assignment, cause: Released, now_s: float) -> None:
        """The sequence is lost at both workers, or its location is unknown."""
        origin, (choice,) = migration.origin, migration.choices
        self._end_migration(migration)
        if origin is not None:
            self._release(origin, (origin.choices.index(choice),), cause, now_s)

    def _end_migration(self, migration: Assignment) -> None:
        """End the migration, in any state."""
        (choice,) = migration.choices
        self._close(migration)
        choice.migration = None
        self._actions.append(EndMigration(choice))

    # Ends of assignments

    def _on_released(
        self, assignment: Assignment, number: int, cause: Released, now_s: float
    ) -> None:
        """The owner released a choice, or all choices before they fork."""
        if not assignment.is_forked:
            self._release_all(assignment, cause, now_s)
        elif assignment.is_prefill_awaited:
            assignment.held.append((number, cause))
        else:
            self._release(assignment, (number,), cause, now_s)

    def _release_all(self, assignment: Assignment, cause: Released, now_s: float) -> None:
        if assignment.origin is None:
            self._release(assignment, range(len(assignment.choices)), cause, now_s)
        elif assignment.has_origin_left:
            self._lose_both(assignment, cause, now_s)
        elif assignment.state is State.DELIVERING:
            # The origin is sending and takes no command; it will report whether it still holds the
            # sequence.
            assignment.failure = cause
            assignment.state, assignment.since_s = State.RETURNING, now_s
            self._actions.append(Close(assignment))
            self._actions.append(SetTimer(assignment, HANDOFF_TIMEOUT_S))
        else:
            self._stay(assignment)

    def _release(
        self, assignment: Assignment, numbers: Iterable[int], cause: Released, now_s: float
    ) -> None:
        """Release choices from the assignment; those that have not ended are queued again, or
        fail."""
        placement = _placement_of(assignment)
        choices = [assignment.choices[n] for n in numbers if n not in assignment.gone]
        for choice in choices:
            if choice.migration is not None:
                self._end_migration(choice.migration)
            self._take_pending(choice)
        choices = [choice for choice in choices if not choice.is_over]
        if not choices or self._is_closed:
            return
        if isinstance(cause, BatonError) and not isinstance(cause, RetriableError):
            self._fail(cause)
            return
        for choice in choices:
            self._drop(assignment, choice)
        if isinstance(cause, BatonError):
            self._timeline.note(RequestEvent.FAILED, now_s)
            num_fatal = sum(choice.note_failure(cause, placement) for choice in choices)
            if num_fatal:
                self._fail(cause)
                return
        for group in self._grouped(choices):
            if not isinstance(cause, Deferred):
                self._timeline.num_resumes += 1
                self._timeline.note(RequestEvent.RESUMED, now_s)
            self._wait(group, now_s)

    def _grouped(self, choices: Sequence[Choice]) -> Sequence[Sequence[Choice]]:
        """Group the choices that share a sequence: all of them before the first tokens, else each
        alone."""
        is_one = len(choices) == len(self.choices) and not any(c.output.token_ids for c in choices)
        return (choices,) if is_one else [(choice,) for choice in choices]

    def _take_pending(self, choice: Choice) -> None:
        """Add pending tokens to a choice's output, and end the choice if the output has ended."""
        if choice.is_over:
            return
        output, num_known = choice.output, len(choice.output.token_ids)
        pending, choice.pending = choice.pending, []
        try:
            for event in pending if len(pending) == 1 else joined(pending):
                if not output.finish:
                    output.add(event.token_index, event.samples, event.finish, event.score)
        except EngineFault as fault:
            self._fail(fault)
            return
        self._timeline.num_output_tokens += len(output.token_ids) - num_known
        if output.finish and not self._is_closed:
            self._end(choice)

    def _end(self, choice: Choice) -> None:
        choice.is_over = True
        self.num_running -= 1
        if choice.migration is not None:
            self._end_migration(choice.migration)
        assignment = choice.assignment
        if assignment is not None and assignment.placement is not None:
            if assignment.placement.decode is not None:
                self._actions.append(Remember(assignment.placement.decode, self.spec_of((choice,))))
            self._drop(assignment, choice)
        self._actions += self._deliver[choice.index]

    def _drop(self, assignment: Assignment, choice: Choice) -> None:
        """Remove a choice from an assignment. The last one ends it; before the fork, the owner
        keeps running the others."""
        number = assignment.choices.index(choice)
        if number in assignment.gone:
            return
        assignment.gone.add(number)
        if len(assignment.gone) == len(assignment.choices):
            self._close(assignment)
        elif assignment.is_forked:
            self._end_one(assignment, number)

    def _end_one(self, assignment: Assignment, number: int) -> None:
        self._actions.append(SendCommand(assignment, number, Abort()))
        self._actions.append(Update(_placement_of(assignment), Outcome.ONE_ENDED))

    def _close(self, assignment: Assignment) -> None:
        if assignment.state is State.OVER:
            return
        assignment.state = State.OVER
        assignment.is_streaming = False
        assignment.held.clear()
        del self._assignments[assignment]
        self._actions.append(Close(assignment))

    def _close_all(self) -> None:
        self._is_closed = True
        self.num_running = 0
        for assignment in tuple(self._assignments):
            if assignment.origin is not None:
                self._end_migration(assignment)
            else:
                self._close(assignment)

    def _fail(self, error: BatonError) -> None:
        """Fail the request and release all workers at once."""
        if not self._is_closed:
            self._close_all()
            self._actions.append(Fail(error))

    # Placement

    def _wait(self, choices: Sequence[Choice], now_s: float) -> None:
        """Queue choices that have the same tokens for a placement."""
        spec = self.spec_of(choices)
        assignment = Assignment(tuple(choices), State.WAITING, now_s, spec)
        self._assignments[assignment] = None
        for choice in choices:
            choice.assignment = assignment
        self._timeline.enter(Phase.QUEUE, now_s)
        self._timeline.note(RequestEvent.QUEUED, now_s)
        need = Need.of(spec, choices[0].avoid, choices[0].unreached, self._numerics)
        self._actions.append(Place(assignment, need, self._is_return))

    def _open(self, assignment: Assignment, now_s: float) -> None:
        """Open a placed assignment at its owner."""
        placement = _placement_of(assignment)
        assignment.state, assignment.since_s = State.RESERVING, now_s
        self._timeline.enter(Phase.RESERVE, now_s)
        source = KvSource.PREFILL if placement.source is not None else KvSource.LOCAL
        source = KvSource.HANDOFF if assignment.origin else source
        self._actions.append(Open(assignment, placement, source))
        if placement.owner.tier is Tier.DECODE:  # prefill workers queue openings
            self._actions.append(SetTimer(assignment, OPEN_TIMEOUT_S))

    def _taken_actions(self) -> Sequence[Action]:
        actions, self._actions = self._actions, []
        return actions


def _placement_of(assignment: Assignment) -> Placement:
    if assignment.placement is None:
        raise ValueError("the assignment has no place yet")
    return assignment.placement


def _error_of(event: Failed) -> BatonError:
    """Map a worker's failure to an error: RetriableError exactly if the worker says so."""
    kind = BY_REASON.get(event.reason, EngineFault)
    if event.is_retriable != issubclass(kind, RetriableError):
        kind = HandoffFailed if event.is_retriable else EngineFault
    if kind is InvalidRequest:
        field, _, description = event.message.partition(": ")
        return InvalidRequest.of(FieldViolation(field, description))
    return kind(event.message)

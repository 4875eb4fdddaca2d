"""Drives one request: passes events to the reducer, carries out its actions, and writes output to
the client.

Runs in callbacks of links, the dispatcher, timers and writes. The order of events is in state.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from baton.commands import Abort
from baton.errors import BatonError, DeadlineExceeded
from baton.events import SequenceEvent
from baton.types import KvSource, Rank, SequenceSpec
from gateway.intake.decoding import Decoding
from gateway.intake.request import ValidatedRequest
from gateway.links.worker_link import WorkerLink
from gateway.long_work import in_pieces
from gateway.output.delivery import Delivery, Write
from gateway.output.output import ChoiceOutput, Piece, best
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
    Remember,
    SendCommand,
    SetTimer,
    Update,
)
from gateway.request.state import RequestState
from gateway.routing.dispatcher import Dispatcher, Waiting
from gateway.routing.fleet import Fleet, Worker
from gateway.routing.migrator import Migrator
from gateway.routing.placement import Placement
from gateway.telemetry.timing import Timeline

#: Awaited once the request is queued or placed.
OnAdmitted = Callable[[ValidatedRequest], Awaitable[None]]

#: The worker's link, and the first of the sequence's handles there.
_Opened = tuple[WorkerLink, int]

#: A method of the reducer for sequence events. Arguments: assignment, number of the choice in it,
#: event, time.
_Reduce = Callable[[Assignment, int, SequenceEvent, float], Sequence[Action]]

#: Seconds between two pieces of an output while the gateway refuses requests. A piece costs both
#: sides about as much as a refusal, with any number of tokens.
GATHER_S = 0.05

#: Tokens decoded per piece: about five milliseconds without a garbage collection.
_TOKENS_A_PIECE = 4096


@dataclass(frozen=True, slots=True)
class RequestDeps:
    """Dependencies shared by all requests."""

    fleet: Fleet
    dispatcher: Dispatcher
    decodings: Mapping[bool, Decoding]
    """Token decoding, by whether special tokens are skipped."""
    client_stall_timeout_s: float
    migrator: Migrator
    clock: Callable[[], float] | None = None
    """Clock of arrivals and timelines, in seconds. None: the event loop's, which may be coarser."""


class RequestDriver:
    """One request. `deadline_s` is on the event loop's clock, all other times on the clock of
    `deps`."""

    def __init__(
        self,
        deps: RequestDeps,
        request: ValidatedRequest,
        outputs: Sequence[ChoiceOutput],
        write: Write,
        deadline_s: float,
        timeline: Timeline | None = None,
    ) -> None:
        """outputs: one per choice, from `outputs_of`.
        timeline: starts at the request's arrival and may be read by the caller; a new one by
        default."""
        self._deps = deps
        self._request = request
        self._deadline_s = deadline_s
        self._loop = asyncio.get_running_loop()
        self._clock = deps.clock or self._loop.time
        timeline = timeline or Timeline(self._clock())
        timeline.num_choices = request.spec.num_choices
        self._is_best_of = request.num_returned < request.spec.num_choices
        """Whether only the best of the choices are sent."""
        timeline.is_streamed = not (self._is_best_of or request.spec.sampling.beam)
        stall_timeout_s = deps.client_stall_timeout_s
        self._delivery = Delivery(request, write, timeline, self._clock, stall_timeout_s, self._end)
        spec = _with_logprobs(request.spec) if self._is_best_of else request.spec
        ended = {index for index, so_far in request.resume_from.items() if so_far.has_ended}
        self.state = RequestState(spec, outputs, timeline, ended)
        self._over: asyncio.Future[None] = self._loop.create_future()
        """Done when nothing is left to send."""
        self._error: Exception | None = None
        """Error for `run` to raise."""
        self._news: dict[Choice, None] = {}
        """Choices with new output, in order of arrival."""
        self._best: list[tuple[int, Piece]] | None = None
        """With best_of: pieces not sent yet, in reverse order; None until all choices have
        ended."""
        self._gathering: asyncio.TimerHandle | None = None
        """Delivers the news, while more may be added to them."""
        self._sent_s = 0.0
        """Time of the last piece, on the event loop's clock."""
        self._is_delivering = True
        """Whether `_deliver` is running, or a write to the client is pending."""
        self._actions: list[Action] = []
        """Pending actions, consumed by the outermost call of `_perform`."""
        self._is_performing = False
        self._waiting: dict[Assignment, Waiting] = {}
        self._homes: dict[Assignment, _Opened] = {}
        self._sources: dict[Assignment, _Opened] = {}
        self._timers: dict[Assignment, asyncio.TimerHandle] = {}
        self._migrations: dict[Choice, Callable[[], None]] = {}
        """Callbacks of migrations under way."""

    @property
    def account(self) -> bytes:
        """The account charged."""
        return self._request.account

    async def run(self, on_admitted: OnAdmitted | None = None) -> None:
        """Stream the output until the request ends. `on_admitted` is awaited once it is queued or
        placed.

        Raises BatonError with the request's id.
        """
        running = [_RunningChoice(self, choice) for choice in self.state.choices]
        deadline = self._loop.call_at(self._deadline_s, self._on_deadline)
        try:
            self._deps.migrator.add(running)
            self._perform(self.state.on_start(self._clock()))
            if on_admitted is not None and self._error is None:
                # A separate task, so that the opening messages leave for the workers first.
                admitted = asyncio.ensure_future(on_admitted(self._request))
                self._delivery.wait_for(admitted)
                admitted.add_done_callback(self._on_taken)
            else:
                self._is_delivering = False
                self._deliver()
            await self._over
            if self._error is not None:
                raise self._error
        except BatonError as error:
            error.request_id = error.request_id or self._request.spec.request_id
            raise
        finally:
            deadline.cancel()
            self._stop_gathering()
            self._delivery.close()
            self._deps.migrator.remove(running)
            self._perform(self.state.on_close())
            # Left in cycles, a thousand requests that end together would stop the loop for 0.2 s,
            # once they are collected.
            for choice in self.state.choices:
                choice.assignment = choice.migration = None

    def _on_deadline(self) -> None:
        num_tokens = sum(len(choice.output.token_ids) for choice in self.state.choices)
        text = f"the request's time was over with {num_tokens} tokens produced"
        self._end(DeadlineExceeded(text))

    def _end(self, error: Exception | None) -> None:
        """Make `run` return, or raise `error`."""
        if not self._over.done():
            self._error = error
            self._over.set_result(None)

    def _deliver(self) -> None:
        """Send new output until a write is pending.

        Called directly by each event, because waking a task per piece would cost more than the
        piece. An error fails this request in `run`; it is not raised here, since the caller serves
        other requests, too.
        """
        if self._is_delivering or self._over.done():
            return
        self._is_delivering = True
        try:
            while (taken := self._next_piece()) is not None:
                index, piece = taken
                self._sent_s = self._loop.time()
                on_its_way = self._delivery.send(index, piece, self.state.prompt_logprobs)
                if on_its_way is not None:
                    on_its_way.add_done_callback(self._on_taken)
                    return
        except Exception as error:  # noqa: BLE001, see above
            self._end(error)
        self._is_delivering = False
        if self._error is not None or not self.state.num_running:
            self._end(self._error)

    def _gathers(self) -> bool:
        """Whether the news wait for more, which then goes in the same piece: while requests are
        refused, unless this is the beginning or the end of an output."""
        if not all(c.output.token_ids and c.pending for c in self._news) or any(
            c.pending[-1].finish for c in self._news
        ):
            return False
        if self._gathering is None and self._deps.dispatcher.is_refusing:
            due_s = self._sent_s + GATHER_S
            if self._loop.time() < due_s:
                self._gathering = self._loop.call_at(due_s, self._on_gathered)
        return self._gathering is not None

    def _on_gathered(self) -> None:
        self._gathering = None
        self._deliver()

    def _stop_gathering(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None

    def _next_piece(self) -> tuple[int, Piece] | None:
        """Return (index, piece) of a choice with new output, or None. With best_of: one of the
        best, once all have ended."""
        while self._news:
            choice = next(iter(self._news))
            if actions := self.state.on_delivery(choice):
                self._perform(actions)
            del self._news[choice]
            if not self._is_best_of and (piece := choice.output.take()):
                return choice.index, piece
        if not self._is_best_of or self.state.num_running or self._error is not None:
            return None
        if self._best is None:
            pieces = [piece for c in self.state.choices if (piece := c.output.take())]
            self._best = list(enumerate(best(pieces, self._request.num_returned)))[::-1]
        return self._best.pop() if self._best else None

    def _on_taken(self, taken: asyncio.Future[Any]) -> None:
        """Continue once a write has completed or failed."""
        self._is_delivering = False
        if taken.cancelled():
            self._over.cancel()
        elif isinstance(error := taken.exception(), Exception):
            self._end(error)
        self._deliver()

    # Events

    def _on_event(
        self, reduce: _Reduce, assignment: Assignment, number: int, event: SequenceEvent
    ) -> None:
        """Pass an event to `reduce`, the reducer's method for owner or source events, and perform
        the actions."""
        self._perform(reduce(assignment, number, event, self._clock()))

    def _on_place(self, assignment: Assignment, place: Placement | BatonError) -> None:
        self._perform(self.state.on_place(assignment, place, self._clock()))

    def _on_timer(self, assignment: Assignment) -> None:
        self._timers.pop(assignment, None)
        self._perform(self.state.on_timer(assignment, self._clock()))

    # Actions

    def _perform(self, actions: Sequence[Action]) -> None:
        """Perform actions in order. Actions that they trigger are appended."""
        self._actions += actions
        if self._is_performing:
            return
        self._is_performing = True
        try:
            for action in self._actions:  # grows during the loop
                if type(action) is Deliver:
                    self._news[action.choice] = None
                else:
                    self._perform_one(action)
        finally:
            self._is_performing = False
            self._actions.clear()
        if self._error or (self._news and not self._gathers()):
            self._stop_gathering()
            self._deliver()

    def _perform_one(self, action: Action) -> None:  # noqa: PLR0912, one arm per action
        match action:
            case Place(assignment, need, is_return):
                waiting = self._deps.dispatcher.place(
                    assignment.spec,
                    need,
                    partial(self._on_place, assignment),
                    is_return=is_return,
                    account=self._request.account,
                    deadline_s=self._deadline_s,
                )
                if not waiting.is_over:
                    self._waiting[assignment] = waiting
            case Open(assignment, placement, source):
                reduce, link = self.state.on_event, placement.owner_link
                self._homes[assignment] = self._open(assignment, link, source, reduce)
            case OpenSource(assignment, link, ticket):
                reduce, source = self.state.on_source_event, KvSource.LOCAL
                self._sources[assignment] = self._open(assignment, link, source, reduce, ticket)
            case SendCommand(assignment, number, command):
                link, first = self._homes[assignment]
                link.send(first + number, command)
            case AbortSource(assignment):
                self._abort_all(self._sources, assignment)
            case Close(assignment):
                if assignment in self._waiting:
                    self._deps.dispatcher.cancel(self._waiting.pop(assignment))
                self._set_timer(assignment, None)
                self._abort_all(self._sources, assignment)
                self._abort_all(self._homes, assignment)
                if assignment.placement is not None:
                    assignment.placement.release()
            case SetTimer(assignment, delay_s):
                self._set_timer(assignment, delay_s)
            case Update(placement, outcome):
                placement.record(outcome)
            case NoteUndelivered(placement, sender, why):
                placement.note_undelivered(sender, why, self._loop.time())
            case Remember(worker, spec):
                self._deps.dispatcher.record(worker, spec)
            case EndMigration(choice):
                self._migrations.pop(choice)()
            case Fail(error):
                self._error = error

    def _open(
        self,
        assignment: Assignment,
        link: WorkerLink,
        source: KvSource,
        reduce: _Reduce,
        ticket: bytes = b"",
    ) -> _Opened:
        numbers = range(len(assignment.choices))
        sinks = [partial(self._on_event, reduce, assignment, n) for n in numbers]
        return link, link.open(assignment.spec, source, sinks, ticket)

    @staticmethod
    def _abort_all(opened: dict[Assignment, _Opened], assignment: Assignment) -> None:
        if assignment in opened:
            link, first = opened.pop(assignment)
            for handle in range(first, first + len(assignment.choices)):
                link.send(handle, Abort())

    def _set_timer(self, assignment: Assignment, delay_s: float | None) -> None:
        timer = self._timers.pop(assignment, None)
        if timer is not None:
            timer.cancel()
        if delay_s is not None:
            timer = self._loop.call_later(delay_s, self._on_timer, assignment)
            self._timers[assignment] = timer

    def migrate(self, choice: Choice, placement: Placement, on_end: Callable[[], None]) -> None:
        self._migrations[choice] = on_end
        self._perform(self.state.on_migration(choice, placement, self._clock()))


def outputs_of(request: ValidatedRequest, decodings: Mapping[bool, Decoding]) -> list[ChoiceOutput]:
    """Return one empty output per choice. decodings: see RequestDeps."""
    decoding, sampling = decodings[request.text.skip_special_tokens], request.spec.sampling
    # A grammar includes a leading space of the text.
    is_continuation = bool(sampling.grammar)
    return [
        ChoiceOutput(decoding, request.text, sampling.min_tokens, is_continuation=is_continuation)
        for _ in range(request.spec.num_choices)
    ]


async def resumed_outputs_of(
    request: ValidatedRequest, decodings: Mapping[bool, Decoding]
) -> list[ChoiceOutput]:
    """Return one output per choice, including tokens sent by earlier streams. Long texts are
    decoded in pieces."""
    outputs = outputs_of(request, decodings)
    for index, so_far in request.resume_from.items():
        num_chars = max(0, so_far.num_chars - len(request.echo_text or ""))
        resume = partial(outputs[index].resume, num_chars=num_chars)
        await in_pieces(so_far.token_ids, resume, _TOKENS_A_PIECE)
    return outputs


def starting_specs_of(request: ValidatedRequest) -> Sequence[SequenceSpec]:
    """Sequences to place first: all choices as one; after a resume, each choice with its earlier
    tokens."""
    spec, so_far = request.spec, request.resume_from
    if not any(each.token_ids for each in so_far.values()):
        return (spec,)
    token_ids = {index: each.token_ids for index, each in so_far.items()}
    return [
        spec.choice_alone(index, token_ids.get(index, ()))
        for index in range(spec.num_choices)
        if index not in so_far or not so_far[index].has_ended
    ]


def _with_logprobs(spec: SequenceSpec) -> SequenceSpec:
    """The same spec with log probabilities, by which the best choices are selected."""
    num_logprobs = max(0, spec.sampling.logprobs)
    return replace(spec, sampling=replace(spec.sampling, logprobs=num_logprobs))


@dataclass(frozen=True, slots=True, eq=False)
class _RunningChoice:
    """Adapts one choice to migrator.Movable."""

    driver: RequestDriver
    choice: Choice

    @property
    def is_movable(self) -> bool:
        return self.driver.state.is_movable(self.choice)

    @property
    def owner(self) -> Worker | None:
        assignment = self.choice.assignment
        return assignment.placement.owner if assignment and assignment.placement else None

    @property
    def rank(self) -> Rank:
        return self.driver.state.rank_of(self.choice)

    @property
    def account(self) -> bytes:
        return self.driver.account

    @property
    def spec(self) -> SequenceSpec:
        return self.driver.state.spec_of((self.choice,))

    def migrate(self, placement: Placement, on_end: Callable[[], None]) -> None:
        self.driver.migrate(self.choice, placement, on_end)

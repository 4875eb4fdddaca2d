"""One request's life, from the queue to its last chunk.

1. wait for a place                    dispatcher.py
2. open it there, prefill, hand off    attempt.py
3. send what came, as one chunk for all of a choice that is there: delivery.py
4. placed no longer, but not at its end: back to 1, with the tokens so far
5. or moved with its KV, when its decode worker drains or is full: mover.py, movable_seat.py
Choices are one through 1 and 2, and each goes its own way from its first token on. However it ends, both workers are
told at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from baton.errors import BatonError, DeadlineExceeded, NoWorkers, RetriableError
from baton.events import Preempted
from baton.telemetry import Phase, RequestEvent
from baton.types import NumericsClass, Rank, SequenceSpec
from gateway.attempt import Attempt
from gateway.best_of import best
from gateway.choice import Choice, Left
from gateway.delivery import Delivery, Write
from gateway.dispatcher import Dispatcher
from gateway.fail_at import fail_at
from gateway.fleet import Fleet
from gateway.movable_seat import MovableSeat
from gateway.mover import Mover
from gateway.output import Output
from gateway.placement import Placement
from gateway.request import ValidatedRequest
from gateway.seat import Seat
from gateway.stall_watch import StallWatch
from gateway.timing import Timeline

#: Token ids to text; the flag tells whether special tokens are left out.
TextOf = Callable[[Sequence[int], bool], str]

OnAdmitted = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class RelayContext:
    """What all requests share."""

    fleet: Fleet
    dispatcher: Dispatcher
    text_of: TextOf
    client_stall_timeout_s: float
    mover: Mover
    clock: Callable[[], float] | None = None
    """Of arrivals and timelines, in seconds; the event loop's own, which may be coarse, if not given."""


class Relay:
    """One request. `deadline_s` is on the event loop's clock, all other times on the context's."""

    def __init__(
        self,
        context: RelayContext,
        request: ValidatedRequest,
        write: Write,
        deadline_s: float,
        timeline: Timeline | None = None,
    ) -> None:
        """timeline: the request's, from its arrival on, for whoever wants to read it; one of the relay's if not given."""
        self._context = context
        self._request = request
        self.spec = _with_logprobs(request.spec) if request.is_best_of else request.spec
        self._deadline_s = deadline_s
        self._clock = context.clock or asyncio.get_running_loop().time
        self._timeline = timeline or Timeline(request.arrival_s)
        self._timeline.tokenize_ms = request.tokenize_ms
        self._timeline.num_choices = request.spec.num_choices
        self._timeline.is_streamed = not (request.is_best_of or request.spec.sampling.beam)
        self._watch = StallWatch(context.client_stall_timeout_s)
        self._delivery = Delivery(request, write, self._timeline, self._clock, self._watch)
        self._choices = [Choice(i, self._new_output()) for i in range(request.spec.num_choices)]
        self._attempts: list[Attempt] = []
        """Those that may be open."""
        self._on_admitted: OnAdmitted | None = None
        """To be called yet."""
        self._numerics: NumericsClass | None = None
        """Of the workers that the first tokens came from."""

    def _new_output(self) -> Output:
        text = self._request.text
        return Output(
            lambda ids: self._context.text_of(ids, text.skip_special_tokens),
            text,
            self._request.spec.sampling.min_tokens,
        )

    async def run(self, on_admitted: OnAdmitted | None = None) -> None:
        """Stream the output. `on_admitted` is awaited once the request is in the queue, or has a place.

        Raises BatonError with the request's id.
        """
        self._on_admitted = on_admitted
        try:
            async with fail_at(self._deadline_s, self._time_is_over), self._watch.watching():
                await self._run()
        except BatonError as error:
            error.request_id = error.request_id or self._request.spec.request_id
            raise

    def _time_is_over(self) -> DeadlineExceeded:
        num_tokens = sum(choice.output.num_tokens for choice in self._choices)
        return DeadlineExceeded(f"the request's time was over with {num_tokens} tokens produced")

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as others:
                seats = await self._find_seats(self._choices)
                for choice, seat in zip(self._choices[1:], seats[1:], strict=True):
                    others.create_task(self._serve(choice, seat))
                await self._serve(self._choices[0], seats[0])
        except ExceptionGroup as failures:
            # The first one ended the others.
            raise failures.exceptions[0] from failures.exceptions[0].__cause__
        finally:
            for attempt in self._attempts:
                attempt.close()
        if self._request.is_best_of:
            await self._send_best()

    async def _serve(self, choice: Choice, seat: Seat) -> None:
        """See a choice that has a seat to its end, at whatever further seats it takes."""
        traveller = Traveller(self, choice, self.spec.choice_alone(choice.index).rank)
        while not await self._follow(choice, MovableSeat(seat, traveller)):
            (seat,) = await self._find_seats([choice])

    async def _follow(self, choice: Choice, seat: MovableSeat) -> bool:
        """Send what comes to a seat. True if the choice ended there, False if it needs another one."""
        left: Left | None = None
        try:
            self._context.mover.add(seat)
            while left is None and not choice.is_over:
                events = await seat.take_all()
                num_known = choice.output.num_tokens
                left = choice.take(events)
                self._timeline.num_output_tokens += choice.output.num_tokens - num_known
                if not choice.is_over:
                    await self._send(choice)
        finally:
            self._context.mover.remove(seat)
            seat.close()
        if choice.is_over:
            await self._send(choice)
            self._remember(choice, seat.placement)
        elif left is not None:
            self._take_leave([choice], left, seat.placement)
        return choice.is_over

    async def _send(self, choice: Choice) -> None:
        """Send all of a choice that is new, if anything is, unless it has yet to be chosen."""
        if self._request.is_best_of:
            return
        piece = choice.output.take()
        if piece is not None:
            await self._delivery.send(choice.index, piece)

    async def _send_best(self) -> None:
        pieces = [piece for choice in self._choices if (piece := choice.output.take())]
        for index, piece in enumerate(best(pieces, self._request.num_returned)):
            await self._delivery.send(index, piece)

    # Places

    async def _find_seats(self, choices: Sequence[Choice]) -> tuple[Seat, ...]:
        """Seats for choices that know the same tokens, which have come to more tokens there. The caller closes them."""
        is_return = bool(self._attempts)
        while True:
            spec = self.spec_of(choices)
            placement = await self._place(spec, is_return, choices[0])
            is_return = True
            attempt = self.attempt_at(placement, spec)
            left: Left | None
            try:
                attempt.open()
                await self._tell_admitted_meanwhile()
                left = await attempt.part()
            except RetriableError as error:
                left = error
            if left is None:
                self._timeline.has_parted = len(self._choices) > 1
                self._numerics = self._numerics or placement.numerics
                if self._delivery.prompt_logprobs is None:
                    self._delivery.prompt_logprobs = attempt.prompt_logprobs
                return attempt.seats
            attempt.close()
            self._take_leave(choices, left, placement)

    async def _tell_admitted(self) -> None:
        """Only once."""
        tell, self._on_admitted = self._on_admitted, None
        if tell is not None:
            await tell()

    async def _tell_admitted_meanwhile(self) -> None:
        """As _tell_admitted, once what was just put into the workers' streams goes out: they are at it meanwhile."""
        await asyncio.sleep(0)
        await self._tell_admitted()

    def attempt_at(
        self,
        placement: Placement,
        spec: SequenceSpec,
        hand_over: Callable[[bytes], None] | None = None,
    ) -> Attempt:
        """A new attempt, not opened, which ends with the request at the latest."""
        attempt = Attempt(placement, spec, self._timeline, self._deadline_s, self._clock, hand_over)
        self._attempts = [*(open_ for open_ in self._attempts if open_.is_open), attempt]
        return attempt

    def spec_of(self, choices: Sequence[Choice]) -> SequenceSpec:
        """What is to be placed: all choices as one while they have no tokens, else one that has some."""
        spec = self.spec
        if self._delivery.prompt_logprobs is not None:
            spec = replace(spec, sampling=replace(spec.sampling, prompt_logprobs=-1))
        if len(choices) > 1:
            return spec
        (choice,) = choices
        return spec.choice_alone(choice.index).extended(choice.output.token_ids)

    async def _place(
        self,
        spec: SequenceSpec,
        is_return: bool,
        choice: Choice,
    ) -> Placement:
        queued_s = self._clock()
        self._timeline.enter(Phase.QUEUE, queued_s)
        self._timeline.note(RequestEvent.QUEUED, queued_s)
        try:
            placement = await self._context.dispatcher.place(
                spec,
                on_queued=self._tell_admitted,
                is_return=is_return,
                avoid=choice.avoid,
                unreached=choice.unreached,
                numerics=self._numerics,
            )
        except NoWorkers:
            if choice.failures:
                raise choice.failures[-1] from None
            raise
        placed_s = self._clock()
        self._timeline.queue_ms += (placed_s - queued_s) * 1e3
        self._timeline.note(RequestEvent.PLACED, placed_s)
        self._timeline.name_workers(placement.prefill_name, placement.decode_name)
        return placement

    def _take_leave(self, choices: Sequence[Choice], left: Left, placement: Placement) -> None:
        """Note why choices need another place. Raises the error that no other place mends, or one too many."""
        if isinstance(left, BatonError):
            if not isinstance(left, RetriableError):
                raise left
            self._timeline.note(RequestEvent.FAILED, self._clock())
            prefill = placement.prefill.address if placement.prefill else ""
            decode = placement.decode.address if placement.decode else ""
            for choice in choices:
                choice.note_failure(left, prefill, decode)
        if isinstance(left, Preempted | RetriableError):
            self._timeline.num_resumes += 1
            self._timeline.note(RequestEvent.RESUMED, self._clock())

    def note_move(self, placement: Placement) -> None:
        self._timeline.name_workers(placement.prefill_name, placement.decode_name)
        self._timeline.note(RequestEvent.MOVED, self._clock())

    def _remember(self, choice: Choice, placement: Placement) -> None:
        if placement.decode is not None:
            self._context.dispatcher.record(placement.decode, self.spec_of([choice]))


@dataclass(frozen=True, slots=True)
class Traveller:
    """One choice of a relay, as moves see it: a movable_seat.Passenger."""

    relay: Relay
    choice: Choice
    rank: Rank

    @property
    def num_tokens(self) -> int:
        return len(self.relay.spec.prompt_token_ids) + self.choice.output.num_tokens

    def spec_so_far(self) -> SequenceSpec:
        return self.relay.spec_of([self.choice])

    def open_at(self, placement: Placement, hand_over: Callable[[bytes], None]) -> Attempt:
        return self.relay.attempt_at(placement, self.spec_so_far(), hand_over)

    def has_moved(self, placement: Placement) -> None:
        self.relay.note_move(placement)


def _with_logprobs(spec: SequenceSpec) -> SequenceSpec:
    """The same, with the log probabilities that tell which of the choices are the best."""
    num_logprobs = max(0, spec.sampling.logprobs)
    return replace(spec, sampling=replace(spec.sampling, logprobs=num_logprobs))

"""One stay of a sequence, or of several choices of one prompt, on the workers it was placed on.

    open D ──Offered──> prefill on P ──first tokens──> tokens of D ... finish
       │ PrefillsHere ───────────────────────────────> tokens of D ... finish
       │ Deferred ──> back to the queue                     │ Preempted ──> back to the queue, with the tokens so far
       └ Failed, or P fails ──> as Preempted, if another try may help
                                    P may fail after its first tokens, too: the KV cannot be delivered

The choices part at their first tokens. What happens before happens to all of them; from then on each has its seat. The
gateway may know the first tokens earlier than the decode worker, where the choices are one until the KV is there. The
outputs of a beam search part at its end.

P's answer and D's tokens come on different ways: what D tells before P's answer is here waits for it. Once D has said that it
has the KV, D's word counts: P may not have heard of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from baton.errors import (
    BY_REASON,
    BatonError,
    EngineFault,
    HandoffFailed,
    RetriableError,
    WorkerLost,
)
from baton.events import (
    Committed,
    DecodeEvent,
    Deferred,
    Failed,
    HandedOff,
    HandOffFailed,
    Offered,
    Paused,
    Preempted,
    PrefillsHere,
    PromptScored,
    Tokens,
)
from baton.telemetry import Phase, RequestEvent
from baton.types import KvSource, SequenceSpec, TokenLogprobs
from gateway.choice import Left, SeatEvent
from gateway.links import DecodeLink, PrefillResult
from gateway.placement import Placement
from gateway.seat import Seat
from gateway.timing import Timeline

#: How long a decode worker may take to answer an opening. A frozen one is noticed sooner; this is for lost messages.
OPEN_TIMEOUT_S = 15.0


class Attempt:
    """Owns what the choices hold on the workers; `close` gives all of it back, whatever state it is in."""

    def __init__(
        self,
        placement: Placement,
        spec: SequenceSpec,
        timeline: Timeline,
        deadline_s: float,
        clock: Callable[[], float] | None = None,
        hand_over: Callable[[bytes], None] | None = None,
    ) -> None:
        """deadline_s: on the event loop's clock. clock: the timeline's, the loop's own if not given.

        hand_over: for one sequence that runs on another decode worker; has it sent to the owner of the ticket given.
        """
        self.placement = placement
        self.prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        """Of the prompt, once they are known; they are before the choices part, if they were asked for."""
        self.seats = tuple(Seat(self, number) for number in range(spec.num_choices))
        self.has_kv = False
        """Whether the decode worker has the KV, or computes it."""
        self.has_parted_there = False
        """Whether each choice runs under a handle of its own on the decode worker."""
        self._spec = spec
        self._hand_over = hand_over
        self._is_search = spec.sampling.beam is not None
        self._timeline = timeline
        self._deadline_s = deadline_s
        self._loop = asyncio.get_running_loop()
        self._clock = clock or self._loop.time
        self._open_seats = set(range(spec.num_choices))
        self._handle: int | None = None
        self._prefill: asyncio.Task[None] | None = None
        self._asked_s = 0.0
        self._answer_timer: asyncio.TimerHandle | None = None
        self._is_first_awaited = False
        self._parted: asyncio.Future[Left | None] = self._loop.create_future()
        self._held: list[tuple[int, SeatEvent]] = []

    @property
    def is_open(self) -> bool:
        return bool(self._open_seats)

    def open(self) -> None:
        """Ask the decode worker for room; without one, prefill at once."""
        link = self.placement.decode_link
        if link is None:
            self._start_prefill(b"")
            return
        self._asked_s = self._clock()
        self._timeline.enter(Phase.RESERVE, self._asked_s)
        self._answer_timer = self._loop.call_later(OPEN_TIMEOUT_S, self._no_answer_came)
        sinks = [partial(self._hear, number) for number in range(len(self.seats))]
        self._handle = link.open(self._spec, self._source(), sinks)

    def _source(self) -> KvSource:
        if self._hand_over is not None:
            return KvSource.DECODE_WORKER
        return KvSource.PREFILL_WORKER if self.placement.prefill_link else KvSource.HERE

    async def part(self) -> Deferred | Preempted | None:
        """Wait until each choice has its first tokens at its seat; None then, else why none will.

        Raises BatonError when the attempt failed; RetriableError when another one may succeed.
        """
        left = await self._parted
        if isinstance(left, BatonError):
            raise left
        return left

    def when_parted(self, tell: Callable[[Left | None], None]) -> None:
        """Have `tell` called with what `part` would come to, errors as values."""
        self._parted.add_done_callback(lambda parted: tell(parted.result()))

    def link_to(self, number: int) -> tuple[DecodeLink, int]:
        """The decode worker of an open choice, and its handle there."""
        link = self.placement.decode_link
        if link is None or self._handle is None:
            raise ValueError("the choice is on no decode worker")
        return link, self._handle + number

    def close_seat(self, number: int) -> None:
        """End one choice. The last one ends the attempt."""
        if number not in self._open_seats:
            return
        self._open_seats.discard(number)
        if not self._open_seats:
            self.close()
        elif self.has_parted_there:
            self._abort_there(number)

    def close(self) -> None:
        """End it on both workers. Idempotent."""
        self._open_seats.clear()
        self._answer_came()
        if self._prefill is not None:
            self._prefill.cancel()
        if self._handle is not None and self.placement.decode_link is not None:
            for handle in range(self._handle, self._handle + len(self.seats)):
                self.placement.decode_link.abort(handle)
            self._handle = None
        self.placement.release()

    # What the decode worker tells

    def _hear(self, number: int, event: DecodeEvent) -> None:
        """Take an event of one choice, or of all while they are one."""
        if not self.is_open:
            return
        match event:
            case Tokens():
                self._take_tokens(number, event)
            case Deferred():
                self._note(RequestEvent.DEFERRED)
                self.placement.defer()
                self._leave(number, event)
            case Preempted():
                self._note(RequestEvent.PREEMPTED)
                self._leave(number, event)
            case Failed():
                self._leave(number, _error_of(event))
            case Paused() | HandedOff() | HandOffFailed():
                self.seats[number].inbox.put(event)
            case _:
                self._take_news(event)

    def _take_tokens(self, number: int, event: Tokens) -> None:
        self._timeline.num_draft_tokens += event.num_draft_tokens
        self._timeline.num_accepted_tokens += event.num_accepted_tokens
        if not self._is_search:
            self._part_there()
        self._hold_or_tell(number, event)

    def _take_news(self, event: Offered | PrefillsHere | PromptScored | Committed) -> None:
        match event:
            case Offered(ticket, num_cached_tokens):
                self._take_answer(RequestEvent.OFFERED, num_cached_tokens)
                self._timeline.reserve_ms += (self._clock() - self._asked_s) * 1e3
                if self._hand_over is not None:
                    self._hand_over(ticket)
                else:
                    self._start_prefill(ticket)
            case PrefillsHere(num_cached_tokens):
                self._take_answer(RequestEvent.PREFILLS_HERE, num_cached_tokens)
                self._timeline.prefills_here()
                self.has_kv = True
                if self._hand_over is None:
                    self._check_split(self._spec.num_tokens - num_cached_tokens)
                self.placement.release_prefill()
            case PromptScored(positions):
                self.prompt_logprobs = positions
            case Committed(transfer_exposed_ms, transfer_bytes):
                self._timeline.transfer_exposed_ms += transfer_exposed_ms
                self._timeline.transfer_bytes += transfer_bytes
                self._note(RequestEvent.COMMITTED)
                self.has_kv = True
                if not self._is_search:
                    self._part_there()

    def _leave(self, number: int, left: Left) -> None:
        """A choice has lost its place; with it all of them while they are one."""
        if self.has_parted_there:
            self._hold_or_tell(number, left)
        else:
            self._end_all(left)

    def _end_all(self, left: Left) -> None:
        self._held.clear()
        if not self._parted.done():
            self._parted.set_result(left)
        for number in self._open_seats:
            self.seats[number].inbox.put(left)

    def _hold_or_tell(self, number: int, event: SeatEvent) -> None:
        """Tell a seat, unless others must hear something before: the first tokens, or the other outputs of a search."""
        self._held.append((number, event))
        if self._is_search:
            if len(self._held) < len(self.seats):
                return
        elif self._is_first_awaited:
            return
        self._tell_held()

    def _tell_held(self) -> None:
        held, self._held = self._held, []
        self._timeline.tokens_here(self._clock())
        for number, event in held:
            if number in self._open_seats:
                self.seats[number].inbox.put(event)
        if not self._parted.done():
            self._parted.set_result(None)

    def _part_there(self) -> None:
        """The decode worker has a handle for each choice. Those that ended here before are ended there now."""
        if self.has_parted_there:
            return
        self.has_parted_there = True
        for number in range(len(self.seats)):
            if number not in self._open_seats:
                self._abort_there(number)

    def _abort_there(self, number: int) -> None:
        link = self.placement.decode_link
        if link is not None and self._handle is not None:
            link.abort(self._handle + number)
            self.placement.release_one()

    def _take_answer(self, event: RequestEvent, num_cached_tokens: int) -> None:
        self._note(event)
        self._answer_came()
        self.placement.settle()
        if self._timeline.decode_cached_tokens is None:
            self._timeline.decode_cached_tokens = num_cached_tokens

    def _answer_came(self) -> None:
        if self._answer_timer is not None:
            self._answer_timer.cancel()
            self._answer_timer = None

    def _no_answer_came(self) -> None:
        text = f"the decode worker did not answer an opening within {OPEN_TIMEOUT_S:g} s"
        self._end_all(HandoffFailed(text))

    def _check_split(self, num_missing_tokens: int) -> None:
        if self.placement.bypasses_split(num_missing_tokens):
            timeline = self._timeline
            timeline.num_bypassed_tokens = max(timeline.num_bypassed_tokens, num_missing_tokens)

    def _note(self, event: RequestEvent) -> None:
        self._timeline.note(event, self._clock())

    # What the prefill worker tells

    def _start_prefill(self, ticket: bytes) -> None:
        link = self.placement.prefill_link
        if link is None:
            self._end_all(EngineFault("a ticket came for a sequence that needs no prefill worker"))
            return
        self._is_first_awaited = True
        self._timeline.enter(Phase.PREFILL, self._clock())
        timeout_s = max(0.0, self._deadline_s - self._loop.time())
        self._prefill = self._loop.create_task(
            link.prefill(self._spec, ticket, timeout_s, self._take_first)
        )
        self._prefill.add_done_callback(self._prefill_done)

    def _prefill_done(self, task: asyncio.Task[None]) -> None:
        """The KV is delivered, or will not be."""
        if task.cancelled() or not self.is_open:
            return
        error = task.exception()
        if error is None or (self.has_kv and not self._is_first_awaited):
            return
        if isinstance(error, BatonError):
            if isinstance(error, WorkerLost):
                self.placement.suspect_prefill()
            elif isinstance(error, HandoffFailed):
                self.placement.note_undelivered(
                    self.placement.prefill, error.message, self._loop.time()
                )
            self._end_all(error)
        else:
            fault = EngineFault(f"{type(error).__name__} on the way to the prefill worker")
            fault.__cause__ = error
            self._end_all(fault)

    def _take_first(self, result: PrefillResult) -> None:
        if not self.is_open:
            return
        self._is_first_awaited = False
        self.placement.release_prefill()
        timeline, now_s = self._timeline, self._clock()
        timeline.note(RequestEvent.PREFILLED, now_s)
        timeline.prefill_answered(result.queue_ms + result.compute_ms, now_s)
        timeline.prefill_queue_ms += result.queue_ms
        timeline.prefill_ms += result.compute_ms
        if timeline.cached_tokens is None:
            timeline.cached_tokens = result.num_cached_tokens
        self.prompt_logprobs = result.prompt_logprobs
        if self._is_search:
            timeline.tokens_here(now_s)
            return
        if len(result.firsts) != len(self.seats):
            fault = f"{len(result.firsts)} first tokens came for {len(self.seats)} choices"
            self._end_all(EngineFault(fault))
            return
        index = len(self._spec.output_token_ids)
        self._held[:0] = [
            (number, Tokens(index, (first.sample,), first.finish))
            for number, first in enumerate(result.firsts)
        ]
        self._tell_held()


def _error_of(event: Failed) -> BatonError:
    """What a decode worker's failure means here: a RetriableError exactly if it said so."""
    kind = BY_REASON.get(event.reason, EngineFault)
    if event.is_retriable != issubclass(kind, RetriableError):
        kind = HandoffFailed if event.is_retriable else EngineFault
    return kind(event.message)

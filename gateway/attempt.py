"""One stay of a sequence on the workers it was placed on: from the opening to an end that is told, or to the close.

    open D ──Offered──> prefill on P ──first token──> tokens of D ... finish
       │ PrefillsHere ──────────────────────────────> tokens of D ... finish
       │ Deferred ──> back to the queue                    │ Preempted ──> back to the queue, with the tokens so far
       └ Failed, or P fails ──> as Preempted, if another try may help

P's answer and D's tokens come on different ways: tokens that D sends before P's answer is here wait for it.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from dataclasses import dataclass

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
    Offered,
    Preempted,
    PrefillsHere,
    Tokens,
)
from baton.telemetry import Phase, RequestEvent
from baton.types import FinishReason, SequenceSpec
from gateway.inbox import Inbox
from gateway.links import PrefillResult
from gateway.output import Output
from gateway.placement import Placement
from gateway.timing import Timeline

#: How long a decode worker may take to answer an opening. A frozen one is noticed sooner; this is for lost messages.
OPEN_TIMEOUT_S = 15.0


class Outcome(enum.Enum):
    """How an attempt stands after some events."""

    GOES_ON = enum.auto()
    OVER = enum.auto()
    """The output has ended."""
    DEFERRED = enum.auto()
    PREEMPTED = enum.auto()


@dataclass(frozen=True, slots=True)
class _PrefillFailed:
    error: BatonError


_Event = DecodeEvent | PrefillResult | _PrefillFailed


class Attempt:
    """Owns what the sequence holds on the workers; `close` gives all of it back, whatever state it is in."""

    def __init__(
        self,
        placement: Placement,
        spec: SequenceSpec,
        output: Output,
        timeline: Timeline,
        deadline_s: float,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """deadline_s: on the event loop's clock. clock: the timeline's, the loop's own if not given."""
        self._placement = placement
        self._spec = spec
        self._output = output
        self._timeline = timeline
        self._deadline_s = deadline_s
        self._inbox: Inbox[_Event] = Inbox()
        self._loop = asyncio.get_running_loop()
        self._clock = clock or self._loop.time
        self._handle: int | None = None
        self._prefill: asyncio.Task[PrefillResult] | None = None
        self._asked_s: float | None = None
        """When the decode worker was asked for room, on the loop's clock, until it answers."""
        self._is_first_awaited = False
        self._early_tokens: list[Tokens] = []

    def open(self) -> None:
        """Ask the decode worker for room; without one, prefill at once."""
        link = self._placement.decode_link
        if link is None:
            self._start_prefill(b"")
            return
        self._asked_s = self._loop.time()
        self._timeline.enter(Phase.RESERVE, self._clock())
        self._handle = link.open(self._spec, self._placement.prefill_link is None, self._inbox.put)

    async def step(self) -> Outcome:
        """Wait until something happened, and take it into the output.

        Raises BatonError when the attempt failed; RetriableError when another one may succeed.
        """
        for event in await self._next_events():
            outcome = self._take(event)
            if outcome is not Outcome.GOES_ON:
                return outcome
        return Outcome.GOES_ON

    def close(self) -> None:
        """End it on both workers. Idempotent."""
        if self._prefill is not None:
            self._prefill.cancel()
        if self._handle is not None and self._placement.decode_link is not None:
            self._placement.decode_link.abort(self._handle)
            self._handle = None
        self._placement.release()

    async def _next_events(self) -> list[_Event]:
        if self._asked_s is None:
            return await self._inbox.take_all()
        try:
            async with asyncio.timeout_at(self._asked_s + OPEN_TIMEOUT_S):
                return await self._inbox.take_all()
        except TimeoutError:
            raise HandoffFailed(
                f"the decode worker did not answer an opening within {OPEN_TIMEOUT_S:g} s"
            ) from None

    def _take(self, event: _Event) -> Outcome:
        match event:
            case Tokens():
                return self._take_tokens(event)
            case PrefillResult():
                return self._take_first(event)
            case Offered(ticket, num_cached_tokens):
                self._take_answer(num_cached_tokens)
                self._timeline.ticket_came(self._clock())
                self._note(RequestEvent.OFFERED)
                self._placement.settle()
                self._start_prefill(ticket)
            case PrefillsHere(num_cached_tokens):
                self._take_answer(num_cached_tokens)
                self._note(RequestEvent.PREFILLS_HERE)
                self._timeline.prefills_here()
                self._check_split(self._spec.num_tokens - num_cached_tokens)
                self._placement.release_prefill()
            case Committed(transfer_exposed_ms, transfer_bytes):
                self._timeline.transfer_exposed_ms += transfer_exposed_ms
                self._timeline.transfer_bytes += transfer_bytes
                self._note(RequestEvent.COMMITTED)
            case Deferred():
                self._note(RequestEvent.DEFERRED)
                self._placement.defer()
                return Outcome.DEFERRED
            case Preempted():
                self._note(RequestEvent.PREEMPTED)
                return Outcome.PREEMPTED
            case Failed():
                raise _error_of(event)
            case _PrefillFailed(error):
                if isinstance(error, WorkerLost):
                    self._placement.suspect_prefill()
                raise error
        return Outcome.GOES_ON

    def _take_tokens(self, event: Tokens) -> Outcome:
        if self._is_first_awaited:
            self._early_tokens.append(event)
            return Outcome.GOES_ON
        self._placement.settle()
        self._timeline.tokens_here(self._clock())
        self._output.add(event.token_index, event.samples, event.finish)
        return self._ended_or_goes_on()

    def _take_first(self, result: PrefillResult) -> Outcome:
        self._is_first_awaited = False
        self._placement.release_prefill()
        timeline, now_s = self._timeline, self._clock()
        timeline.note(RequestEvent.PREFILLED, now_s)
        timeline.prefill_answered(result.queue_ms + result.compute_ms, now_s)
        timeline.tokens_here(now_s)
        timeline.prefill_queue_ms += result.queue_ms
        timeline.prefill_ms += result.compute_ms
        if timeline.cached_tokens is None:
            timeline.cached_tokens = result.num_cached_tokens
        index = len(self._spec.output_token_ids)
        self._output.add(index, (result.sample,), result.finish)
        outcome = self._ended_or_goes_on()
        for event in self._early_tokens:
            if outcome is Outcome.GOES_ON:
                outcome = self._take_tokens(event)
        self._early_tokens.clear()
        return outcome

    def _ended_or_goes_on(self) -> Outcome:
        is_over = self._output.finish is not FinishReason.NONE
        return Outcome.OVER if is_over else Outcome.GOES_ON

    def _take_answer(self, num_cached_tokens: int) -> None:
        self._asked_s = None
        if self._timeline.decode_cached_tokens is None:
            self._timeline.decode_cached_tokens = num_cached_tokens

    def _start_prefill(self, ticket: bytes) -> None:
        link = self._placement.prefill_link
        if link is None:
            raise EngineFault("a ticket came for a sequence that needs no prefill worker")
        self._is_first_awaited = True
        self._timeline.enter(Phase.PREFILL, self._clock())
        timeout_s = max(0.0, self._deadline_s - self._loop.time())
        self._prefill = self._loop.create_task(link.prefill(self._spec, ticket, timeout_s))
        self._prefill.add_done_callback(self._prefill_done)

    def _note(self, event: RequestEvent) -> None:
        self._timeline.note(event, self._clock())

    def _check_split(self, num_missing_tokens: int) -> None:
        if self._placement.bypasses_split(num_missing_tokens):
            timeline = self._timeline
            timeline.num_bypassed_tokens = max(timeline.num_bypassed_tokens, num_missing_tokens)

    def _prefill_done(self, task: asyncio.Task[PrefillResult]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._inbox.put(task.result())
        elif isinstance(error, BatonError):
            self._inbox.put(_PrefillFailed(error))
        else:
            fault = EngineFault(f"{type(error).__name__} on the way to the prefill worker")
            fault.__cause__ = error
            self._inbox.put(_PrefillFailed(fault))


def _error_of(event: Failed) -> BatonError:
    """What a decode worker's failure means here: a RetriableError exactly if it said so."""
    kind = BY_REASON.get(event.reason, EngineFault)
    if event.is_retriable != issubclass(kind, RetriableError):
        kind = HandoffFailed if event.is_retriable else EngineFault
    return kind(event.message)

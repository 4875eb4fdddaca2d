"""Tells each sequence's way through a decode worker to telemetry, from the core's commands and events.

Spans: the transfer from the moment its ticket was presented, the commit until the sequence runs, and the decode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind

from baton.errors import Cancelled
from baton.events import (
    Committed,
    Deferred,
    Failed,
    HandedOff,
    Offered,
    Preempted,
    PrefillsHere,
    Tokens,
)
from baton.telemetry import RequestEvent, Telemetry, names
from baton.telemetry.context import context_of
from baton.telemetry.histograms import seconds_histogram
from baton.telemetry.names import SpanName
from baton.telemetry.spans import SpanWriter, TimedEvent
from baton.telemetry.wall_clock import WallClock
from baton.types import FinishReason, SequenceSpec
from baton.worker.watch import CommandLog
from decode_svc.commands import Abort, DecodeCommand, Open, StreamClosed, StreamEvent
from kv_transfer.kv_ticket import parse_ticket
from kv_transfer.ticket import TicketCommitted, TicketDead

#: What a ticket that is committed has been through, and nobody but its worker saw.
_TICKET_EVENTS: Final = (RequestEvent.RESERVED, RequestEvent.RECEIVING, RequestEvent.COMMITTED)

_Key = tuple[int, int]
_TicketEnd = TicketCommitted | TicketDead


@dataclass(slots=True, eq=False)
class _Sequence:
    """A sequence while it is here. `state`: the last event. Times in seconds of the worker's clock."""

    spec: SequenceSpec
    parent: Context
    state: RequestEvent = RequestEvent.PLACED
    ticket_id: int | None = None
    offered_s: float = 0.0
    committed: tuple[float, TicketCommitted] | None = None
    running_s: float | None = None


class DecodeRecorder:
    """`on_command` may be called in any thread, `on_step` in one only."""

    def __init__(self, telemetry: Telemetry, clock: Callable[[], float]) -> None:
        """clock: the ticket table's, in seconds."""
        self._telemetry = telemetry
        self._clock = clock
        self._log: CommandLog[DecodeCommand] = CommandLog(clock)
        self._sequences: dict[_Key, _Sequence] = {}
        self._by_ticket: dict[int, _Key] = {}
        self._num_choices: dict[_Key, int] = {}
        """Of sequences that are still one, by their first handles."""
        meter = telemetry.meter
        counter = meter.create_counter
        self._decoded = counter("baton.decode.tokens", description="Tokens produced.")
        self._drafts = counter("baton.drafts", description="Steps of a sequence with drafts.")
        self._drafted = counter("baton.draft.tokens", description="Tokens drafted.")
        self._accepted = counter("baton.draft.accepted.tokens", description="Drafts confirmed.")
        self._queried = counter("baton.prefix.query.tokens", description="Tokens looked up.")
        self._hit = counter("baton.prefix.hit.tokens", description="Tokens found computed.")
        self._preempted = counter("baton.preemptions", description="Sequences sent away.")
        self._cancelled = counter("baton.sequences.cancelled", description="Sequences given up.")
        self._failed = counter("baton.sequences.failed", description="Sequences that failed.")
        self._handed_off = counter("baton.handoffs", description="Sequences moved elsewhere.")
        self._deferred = counter("baton.deferrals", description="Sequences there was no room for.")
        self._events = counter("baton.request.events", description="What happened to requests.")
        self._received = counter("baton.transfer.received", unit="By", description="KV received.")
        self._transfer_time = seconds_histogram(
            meter, "baton.transfer.duration", "From a ticket's presentation to its commit."
        )
        self._exposed_time = seconds_histogram(
            meter,
            "baton.transfer.exposed",
            "From the end of a prefill to the commit: what no compute hid.",
        )

        for counted in (
            self._preempted,
            self._handed_off,
            self._deferred,
            self._received,
            self._decoded,
            self._drafts,
            self._drafted,
            self._accepted,
        ):
            counted.add(0)
        for event in (*_TICKET_EVENTS, RequestEvent.ABORTED):
            self._events.add(0, {names.EVENT: event.value})
        for state in (RequestEvent.OFFERED, RequestEvent.COMMITTED, RequestEvent.PREFILLS_HERE):
            self._cancelled.add(0, {names.STATE: state.value})

    def on_command(self, command: DecodeCommand) -> None:
        """A command goes to the core."""
        self._log.put(command)

    def on_step(self, events: Sequence[StreamEvent]) -> None:
        """The core made a step. An offer of this step precedes the end of its ticket, wherever that was heard first."""
        ends: list[tuple[float, _TicketEnd]] = []
        for at_s, command in self._log.take():
            if isinstance(command, TicketCommitted | TicketDead):
                ends.append((at_s, command))
            else:
                self._obey(at_s, command)
        now_s = self._clock()
        for event in events:
            if isinstance(event.event, Offered):
                self._offered((event.stream, event.handle), event.event, now_s)
        for at_s, end in ends:
            self._ticket_ended(at_s, end)
        for event in events:
            self._happened((event.stream, event.handle), event, now_s)

    def _obey(self, at_s: float, command: DecodeCommand) -> None:
        match command:
            case Open(stream, handle, spec):
                parent = context_of(spec.traceparent, spec.tracestate)
                for choice in range(spec.num_choices):
                    alone = spec.choice_alone(choice)
                    self._sequences[stream, handle + choice] = _Sequence(alone, parent)
                self._num_choices[stream, handle] = spec.num_choices
            case Abort(stream, handle):
                self._give_up((stream, handle), at_s)
            case StreamClosed(stream):
                for key in [key for key in self._sequences if key[0] == stream]:
                    self._give_up(key, at_s)

    def _offered(self, key: _Key, event: Offered, now_s: float) -> None:
        sequence = self._sequences.get(key)
        if sequence is None:
            return
        sequence.state, sequence.offered_s = RequestEvent.OFFERED, now_s
        sequence.ticket_id = parse_ticket(event.ticket).ticket_id
        self._by_ticket[sequence.ticket_id] = key
        self._count_prefix(sequence, event.num_cached_tokens)

    def _ticket_ended(self, at_s: float, end: _TicketEnd) -> None:
        key = self._by_ticket.pop(end.ticket_id, None)
        sequence = self._sequences.get(key) if key is not None else None
        if sequence is None:
            return
        if isinstance(end, TicketCommitted):
            sequence.committed = (at_s, end)
            for event in _TICKET_EVENTS:
                self._events.add(1, {names.EVENT: event.value})
            self._received.add(end.num_bytes)
            self._transfer_time.record(max(0.0, at_s - end.reserved_s))
            self._exposed_time.record(end.transfer_exposed_ms / 1e3)
            return
        sequence.state = RequestEvent.ABORTED
        self._events.add(1, {names.EVENT: RequestEvent.ABORTED.value})
        if self._telemetry.has_traces:
            ended = (RequestEvent.ABORTED, at_s)
            self._write(SpanName.TRANSFER, sequence, sequence.offered_s, at_s, ended, end.reason)

    def _happened(self, key: _Key, event: StreamEvent, now_s: float) -> None:
        happened = event.event
        if isinstance(happened, Tokens):
            self._decoded.add(len(happened.samples))
            if happened.num_draft_tokens:
                self._drafts.add(1)
                self._drafted.add(happened.num_draft_tokens)
                self._accepted.add(happened.num_accepted_tokens)
            if happened.finish is not FinishReason.NONE:
                num_tokens = happened.token_index + len(happened.samples)
                self._leave(key, RequestEvent.FINISHED, now_s, num_tokens=num_tokens)
            return
        sequence = self._sequences.get(key)
        if sequence is None:
            return
        match happened:
            case PrefillsHere(num_cached_tokens):
                self._start(key, RequestEvent.PREFILLS_HERE, now_s)
                self._count_prefix(sequence, num_cached_tokens)
            case Committed():
                self._start(key, RequestEvent.COMMITTED, now_s)
                self._trace_handoff(sequence, now_s)
            case Preempted():
                self._preempted.add(1)
                self._leave_all(key, RequestEvent.PREEMPTED, now_s)
            case Deferred():
                self._deferred.add(1)
                self._leave_all(key, RequestEvent.DEFERRED, now_s)
            case HandedOff():
                self._handed_off.add(1)
                self._leave(key, RequestEvent.HANDED_OFF, now_s)
            case Failed(reason):
                self._failed.add(1, {names.REASON: reason})
                self._leave_all(key, RequestEvent.FAILED, now_s, error=reason)

    def _choices(self, key: _Key) -> list[_Key]:
        """The handles that an event under `key` is about: all choices of a sequence that is still one."""
        stream, handle = key
        return [(stream, handle + choice) for choice in range(self._num_choices.pop(key, 1))]

    def _start(self, key: _Key, state: RequestEvent, now_s: float) -> None:
        for choice in self._choices(key):
            if sequence := self._sequences.get(choice):
                sequence.state, sequence.running_s = state, now_s

    def _leave_all(self, key: _Key, event: RequestEvent, now_s: float, error: str = "") -> None:
        for choice in self._choices(key):
            self._leave(choice, event, now_s, error=error)

    def _count_prefix(self, sequence: _Sequence, num_cached_tokens: int) -> None:
        self._queried.add(sequence.spec.num_tokens)
        self._hit.add(num_cached_tokens)

    def _trace_handoff(self, sequence: _Sequence, now_s: float) -> None:
        if not self._telemetry.has_traces or sequence.committed is None:
            return
        at_s, committed = sequence.committed
        self._writer().write(
            SpanName.TRANSFER,
            sequence.parent,
            committed.reserved_s,
            at_s,
            kind=SpanKind.CONSUMER,
            attributes={
                names.REQUEST_ID: sequence.spec.request_id,
                names.TRANSFER_BYTES: committed.num_bytes,
                names.TRANSFER_EXPOSED_MS: committed.transfer_exposed_ms,
            },
            events=(
                (RequestEvent.OFFERED, sequence.offered_s),
                (RequestEvent.RESERVED, committed.reserved_s),
                (RequestEvent.RECEIVING, committed.receiving_s),
                (RequestEvent.COMMITTED, at_s),
            ),
        )
        self._write(SpanName.COMMIT, sequence, at_s, now_s, (RequestEvent.COMMITTED, now_s))

    def _give_up(self, key: _Key, at_s: float) -> None:
        sequence = self._sequences.get(key)
        if sequence is not None:
            self._cancelled.add(1, {names.STATE: sequence.state.value})
            self._leave(key, RequestEvent.CANCELLED, at_s, error=Cancelled.reason)

    def _leave(
        self, key: _Key, event: RequestEvent, now_s: float, *, num_tokens: int = 0, error: str = ""
    ) -> None:
        """The sequence is over here; what it did since it ran is its decode span."""
        sequence = self._sequences.pop(key, None)
        if sequence is None:
            return
        self._num_choices.pop(key, None)
        if sequence.ticket_id is not None:
            self._by_ticket.pop(sequence.ticket_id, None)
        if self._telemetry.has_traces and sequence.running_s is not None:
            start_s = sequence.running_s
            self._write(
                SpanName.DECODE, sequence, start_s, now_s, (event, now_s), error, num_tokens
            )

    def _write(
        self,
        name: SpanName,
        sequence: _Sequence,
        start_s: float,
        end_s: float,
        event: TimedEvent,
        error: str = "",
        num_tokens: int = 0,
    ) -> None:
        attributes: dict[str, str | int | float | bool | tuple[str, ...]] = {
            names.REQUEST_ID: sequence.spec.request_id
        }
        if num_tokens:
            attributes[names.USAGE_OUTPUT_TOKENS] = num_tokens
        self._writer().write(
            name,
            sequence.parent,
            start_s,
            end_s,
            attributes=attributes,
            events=(event,),
            error=error,
        )

    def _writer(self) -> SpanWriter:
        return SpanWriter(self._telemetry.tracer, WallClock.of(self._clock))

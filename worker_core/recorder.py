"""Telemetry of sequences in a worker, from the core's commands and events.

Spans of a local prompt: the wait for blocks, the prefill with one child per chunk, and, with a
destination, the sending of KV until the receiver has all of it. Spans of a running sequence: the
transfer since the ticket was presented, the commit until it runs, and the decode.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind

from baton.commands import Abort
from baton.errors import Cancelled
from baton.events import (
    Committed,
    Deferred,
    Failed,
    HandedOff,
    LocalPrefill,
    NotHandedOff,
    Offered,
    Preempted,
    Prefilled,
    Tokens,
)
from baton.telemetry import RequestEvent, Telemetry, names
from baton.telemetry.metrics import Counts
from baton.telemetry.names import SpanName
from baton.telemetry.spans import SpanWriter, TimedEvent, WallClock, context_of
from baton.types import FinishReason, SequenceSpec
from kv_transfer.sender import SendDone
from kv_transfer.ticket import TicketAborted, TicketCommitted
from worker_core.commands import Command, Open, StreamClosed, StreamCommand, StreamEvent

#: Events of a committed ticket, all reported by its owner.
_TICKET_EVENTS: Final = (RequestEvent.RESERVED, RequestEvent.RECEIVING, RequestEvent.COMMITTED)
#: Phase of a sequence with a destination when it was cancelled: before and after its first token.
_COMPUTING: Final = "computing"
_SENDING: Final = "sending"

_Key = tuple[int, int]
_TicketEnd = TicketCommitted | TicketAborted


@dataclass(slots=True, eq=False)
class _Sequence:
    """A sequence in this worker. `state`: the last event. Times in seconds on the worker's clock.

    choices: of a sequence with a destination, those that are still running; it stays one sequence
    here.
    sending_s: time of the first possible send after the prompt is computed.
    sent: time and result of a send that completed before the prompt's events.
    """

    spec: SequenceSpec
    parent: Context
    opened_s: float
    has_destination: bool
    choices: set[int] = field(default_factory=set)
    state: RequestEvent = RequestEvent.PLACED
    ticket_id: int | None = None
    offered_s: float = 0.0
    committed: tuple[float, TicketCommitted] | None = None
    running_s: float | None = None
    sending_s: float | None = None
    sent: tuple[float, SendDone] | None = None


class WorkerRecorder:
    """Records sequences. `on_command` is thread-safe; `on_step` belongs to one thread."""

    def __init__(self, telemetry: Telemetry, clock: Callable[[], float]) -> None:
        """clock: of the core, the sender and the ticket table, in seconds."""
        self._telemetry = telemetry
        self._clock = clock
        self._commands: deque[tuple[float, Command]] = deque()
        """Commands since the last step, in order of submission from any thread."""
        self._sequences: dict[_Key, _Sequence] = {}
        self._by_ticket: dict[int, _Key] = {}
        self._num_choices: dict[_Key, int] = {}
        """Number of choices of sequences before the fork, by first handle."""
        meter, histograms = telemetry.meter, telemetry.histograms
        count = partial(Counts, meter)
        self._computed = count("baton.prefill.tokens", "Prompt tokens computed.")
        self._decoded = count("baton.decode.tokens", "Tokens produced.")
        self._drafts = count("baton.drafts", "Steps of a sequence with drafts.")
        self._drafted = count("baton.draft.tokens", "Tokens drafted.")
        self._accepted = count("baton.draft.accepted.tokens", "Drafts confirmed.")
        self._queried = count("baton.prefix.query.tokens", "Tokens looked up.")
        self._hit = count("baton.prefix.hit.tokens", "Tokens found computed.")
        self._fetched = count("baton.prefix.fetched.tokens", "Tokens fetched.")
        self._preempted = count("baton.preemptions", "Sequences sent away.")
        self._prompts_failed = count(
            "baton.prompts.failed", "Prompts without a first token.", names.REASON
        )
        self._prompts_cancelled = count(
            "baton.prompts.cancelled", "Prompts given up.", names.STATE, _COMPUTING, _SENDING
        )
        begun = (RequestEvent.OFFERED, RequestEvent.COMMITTED, RequestEvent.LOCAL_PREFILL)
        self._cancelled = count(
            "baton.sequences.cancelled", "Sequences given up.", names.STATE, *begun
        )
        self._failed = count("baton.sequences.failed", "Sequences that failed.", names.REASON)
        self._handed_off = count("baton.handoffs", "Running sequences handed off.")
        self._deferred = count("baton.deferrals", "Sequences there was no room for.")
        self._events = count(
            *("baton.request.events", "What happened to requests.", names.EVENT),
            *(*_TICKET_EVENTS, RequestEvent.ABORTED),
        )
        self._sent_bytes = count("baton.transfer.sent", "KV sent.", unit="By")
        self._received = count("baton.transfer.received", "KV received.", unit="By")
        self._transfer_time = histograms.create(
            "baton.transfer.duration", "From a ticket's presentation to its commit."
        )
        self._exposed_time = histograms.create(
            "baton.transfer.exposed",
            "From the end of a prefill to the commit: what no compute hid.",
        )
        self._send_time = histograms.create(
            "baton.transfer.send.duration",
            "From the first KV to the receiver's word that it has all.",
        )
        self._compute_time = histograms.create(
            "baton.prefill.duration", "From a prompt's first chunk to its first token."
        )

    def on_command(self, command: Command) -> None:
        """Record a command on its way to the core."""
        self._commands.append((self._clock(), command))

    def on_step(self, events: Sequence[StreamEvent], *, is_over: bool = True) -> None:
        """Record the events of a step, of its commands alone unless it is over. Offers are
        processed before the ends of tickets, and all events of a step before SendDone, since these
        may have been submitted earlier."""
        ends: list[tuple[float, _TicketEnd]] = []
        sent: list[tuple[float, SendDone]] = []
        for at_s, command in [self._commands.popleft() for _ in range(len(self._commands))]:
            match command:
                case TicketCommitted() | TicketAborted():
                    ends.append((at_s, command))
                case SendDone():
                    sent.append((at_s, command))
                case _:
                    self._commanded(at_s, command)
        now_s = self._clock()
        for event in events:
            if isinstance(event.event, Offered):
                self._offered((event.stream, event.handle), event.event, now_s)
        for at_s, end in ends:
            self._ticket_ended(at_s, end)
        for event in events:
            self._happened(event, now_s)
        if not is_over:
            self._commands.extendleft(reversed(sent))
            return
        for at_s, done in sent:
            self._sent_one(at_s, done)

    def _commanded(self, at_s: float, command: Command) -> None:
        match command:
            case Open(stream, handle, spec, _, destination):
                parent = context_of(spec.traceparent, spec.tracestate)
                if destination:
                    choices = set(range(handle, handle + spec.num_choices))
                    self._sequences[stream, handle] = _Sequence(spec, parent, at_s, True, choices)
                    return
                for choice in range(spec.num_choices):
                    self._sequences[stream, handle + choice] = _Sequence(spec, parent, at_s, False)
                self._num_choices[stream, handle] = spec.num_choices
            case StreamCommand(stream, handle, Abort()):
                self._choice_given_up((stream, handle), at_s)
            case StreamClosed(stream):
                for key in [key for key in self._sequences if key[0] == stream]:
                    self._give_up(key, at_s)

    # Tickets

    def _offered(self, key: _Key, event: Offered, now_s: float) -> None:
        sequence = self._sequences.get(key)
        if sequence is None:
            return
        sequence.state, sequence.offered_s = RequestEvent.OFFERED, now_s
        sequence.ticket_id = event.ticket_id
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
                self._events.add(1, event)
            self._received.add(end.num_bytes)
            self._transfer_time.record(max(0.0, at_s - end.reserved_s))
            self._exposed_time.record(end.transfer_exposed_ms / 1e3)
            return
        sequence.state = RequestEvent.ABORTED
        self._events.add(1, RequestEvent.ABORTED)
        if self._telemetry.has_traces:
            ended = (RequestEvent.ABORTED, at_s)
            self._write(SpanName.TRANSFER, sequence, sequence.offered_s, at_s, ended, end.reason)

    # Events

    def _happened(self, addressed: StreamEvent, now_s: float) -> None:
        key, event = (addressed.stream, addressed.handle), addressed.event
        if isinstance(event, Tokens):
            self._count_tokens(key, event, now_s)
            return
        key = self._with_destination(key) or key
        sequence = self._sequences.get(key)
        if sequence is None:
            return
        match event:
            case LocalPrefill(num_cached_tokens):
                if not sequence.has_destination:
                    self._start(key, RequestEvent.LOCAL_PREFILL, now_s)
                self._count_prefix(sequence, num_cached_tokens)
            case Prefilled():
                self._prefilled(key, sequence, event)
            case Committed():
                self._start(key, RequestEvent.COMMITTED, now_s)
                self._trace_handoff(sequence, now_s)
            case Preempted():
                self._preempted.add(1)
                self._leave_all(key, RequestEvent.PREEMPTED, now_s)
            case Deferred():
                self._deferred.add(1)
                self._leave_all(key, RequestEvent.DEFERRED, now_s)
            case HandedOff() if not sequence.has_destination:
                self._handed_off.add(1)
                self._leave(key, RequestEvent.HANDED_OFF, now_s)
            case NotHandedOff() if sequence.has_destination:
                sequence.has_destination = False  # an ordinary sequence from here on
                sequence.running_s = now_s
            case Failed(reason):
                failed = self._prompts_failed if sequence.has_destination else self._failed
                failed.add(1, reason)
                if sequence.has_destination and self._telemetry.has_traces:
                    ended = (RequestEvent.FAILED, now_s)
                    self._write(SpanName.PREFILL, sequence, sequence.opened_s, now_s, ended, reason)
                self._leave_all(key, RequestEvent.FAILED, now_s, error=reason)

    def _count_tokens(self, key: _Key, event: Tokens, now_s: float) -> None:
        """Count tokens of running sequences. First tokens of a sequence with a destination are
        counted there, unless they end the choice."""
        num_tokens = event.token_index + len(event.samples)
        has_ended = event.finish is not FinishReason.NONE
        first = self._with_destination(key)
        if first is not None:
            if has_ended:
                self._decoded.add(len(event.samples))
                self._choice_ended(first, key[1])
            return
        self._decoded.add(len(event.samples))
        if event.num_draft_tokens:
            self._drafts.add(1)
            self._drafted.add(event.num_draft_tokens)
            self._accepted.add(event.num_accepted_tokens)
        if has_ended:
            self._leave(key, RequestEvent.FINISHED, now_s, num_tokens=num_tokens)

    def _with_destination(self, key: _Key) -> _Key | None:
        """The first handle of the sequence with a destination that includes this handle; else
        None."""
        stream, handle = key
        sequence = self._sequences.get(key)
        if sequence:
            return key if sequence.has_destination else None
        for other, candidate in self._sequences.items():
            if other[0] == stream and handle in candidate.choices:
                return other
        return None

    def _choice_ended(self, first: _Key, handle: int) -> None:
        sequence = self._sequences[first]
        sequence.choices.discard(handle)
        if not sequence.choices:
            del self._sequences[first]

    def _choices(self, key: _Key) -> list[_Key]:
        """Handles that an event under `key` applies to: all choices before the fork."""
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

    # Local prompts

    def _prefilled(self, key: _Key, sequence: _Sequence, event: Prefilled) -> None:
        num_known = event.num_cached_tokens + event.num_fetched_tokens
        self._computed.add(sequence.spec.num_tokens - num_known)
        self._fetched.add(event.num_fetched_tokens)
        compute_s = event.compute_ms / 1e3
        self._compute_time.record(compute_s)
        chunks = event.chunks
        started_s = chunks[0].begin_s if chunks else sequence.opened_s + event.queue_ms / 1e3
        ended_s = started_s + compute_s
        sequence.sending_s = min(chunks[0].end_s, ended_s) if chunks else ended_s
        if self._telemetry.has_traces:
            self._trace_prefill(sequence, event, started_s, ended_s)
        if sequence.sent is not None:
            self._finish_sending(key, sequence, *sequence.sent)

    def _trace_prefill(
        self, sequence: _Sequence, event: Prefilled, started_s: float, ended_s: float
    ) -> None:
        writer = self._writer()
        writer.write(SpanName.PREFILL_QUEUE, sequence.parent, sequence.opened_s, started_s)
        context = writer.write(
            SpanName.PREFILL,
            sequence.parent,
            started_s,
            ended_s,
            kind=SpanKind.SERVER,
            attributes={
                names.REQUEST_ID: sequence.spec.request_id,
                names.NUM_TOKENS: sequence.spec.num_tokens,
                names.NUM_CACHED_TOKENS: event.num_cached_tokens,
            },
            events=((RequestEvent.PREFILLED, ended_s),),
        )
        for chunk in event.chunks:
            writer.write(
                SpanName.PREFILL_CHUNK,
                context,
                chunk.begin_s,
                chunk.end_s,
                attributes={names.NUM_TOKENS: chunk.num_tokens},
            )

    def _sent_one(self, at_s: float, done: SendDone) -> None:
        self._sent_bytes.add(done.num_bytes)
        key = done.key
        if not isinstance(key, tuple):  # a prefix served from here
            return
        sequence = self._sequences.get(key)
        if sequence is None or not sequence.has_destination:
            return
        if sequence.sending_s is None:
            if done.error is None:
                sequence.sent = (at_s, done)
            return
        self._finish_sending(key, sequence, at_s, done)

    def _finish_sending(self, key: _Key, sequence: _Sequence, at_s: float, done: SendDone) -> None:
        start_s = at_s if sequence.sending_s is None else sequence.sending_s
        if done.error is None:
            del self._sequences[key]
            self._send_time.record(max(0.0, at_s - start_s))
        if self._telemetry.has_traces:
            event = RequestEvent.ABORTED if done.error else RequestEvent.COMMITTED
            self._writer().write(
                SpanName.SEND,
                sequence.parent,
                start_s,
                at_s,
                kind=SpanKind.PRODUCER,
                attributes={
                    names.REQUEST_ID: sequence.spec.request_id,
                    names.TRANSFER_BYTES: done.num_bytes,
                },
                events=((event, at_s),),
                error=done.error.reason if done.error else "",
            )

    # Ends

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

    def _choice_given_up(self, key: _Key, at_s: float) -> None:
        first = self._with_destination(key)
        if first is None:
            self._give_up(key, at_s)
            return
        sequence = self._sequences[first]
        sequence.choices.discard(key[1])
        if not sequence.choices:
            self._give_up(first, at_s)

    def _give_up(self, key: _Key, at_s: float) -> None:
        sequence = self._sequences.get(key)
        if sequence is None:
            return
        if not sequence.has_destination:
            self._cancelled.add(1, sequence.state)
            self._leave(key, RequestEvent.CANCELLED, at_s, error=Cancelled.reason)
            return
        del self._sequences[key]
        is_sending = sequence.sending_s is not None
        self._prompts_cancelled.add(1, _SENDING if is_sending else _COMPUTING)
        if self._telemetry.has_traces:
            self._write(
                SpanName.SEND if is_sending else SpanName.PREFILL,
                sequence,
                sequence.opened_s if sequence.sending_s is None else sequence.sending_s,
                at_s,
                (RequestEvent.CANCELLED, at_s),
                Cancelled.reason,
            )

    def _leave(
        self, key: _Key, event: RequestEvent, now_s: float, *, num_tokens: int = 0, error: str = ""
    ) -> None:
        """End a sequence's record and report its decode span."""
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

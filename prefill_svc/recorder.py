"""Tells each prompt's way through a prefill worker to telemetry, from the core's commands and events.

Spans: the wait for a place, the prefill with a child per chunk, and the sending of KV until the receiver has it all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind

from baton.errors import Cancelled
from baton.telemetry import RequestEvent, Telemetry, names
from baton.telemetry.context import context_of
from baton.telemetry.histograms import seconds_histogram
from baton.telemetry.names import SpanName
from baton.telemetry.spans import SpanWriter
from baton.telemetry.wall_clock import WallClock
from baton.types import SequenceSpec
from baton.worker.watch import CommandLog
from kv_transfer.sender import SendDone
from prefill_svc.commands import (
    Abort,
    PrefillCommand,
    Prefilled,
    PrefillEvent,
    PrefillFailed,
    Submit,
)

#: What a prompt that is given up was in: before its first token, and after.
_STATES: Final = ("computing", "sending")


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt between its submission and the end of its handoff. Times in seconds of the worker's clock."""

    spec: SequenceSpec
    parent: Context
    has_ticket: bool
    submitted_s: float
    sending_s: float | None = None
    """When the first KV could be sent, once the prompt is computed."""
    done: tuple[float, SendDone] | None = None


class PrefillRecorder:
    """`on_command` may be called in any thread, `on_step` in one only."""

    def __init__(self, telemetry: Telemetry, clock: Callable[[], float]) -> None:
        """clock: the core's and the sender's, in seconds."""
        self._telemetry = telemetry
        self._clock = clock
        self._log: CommandLog[PrefillCommand] = CommandLog(clock)
        self._prompts: dict[str, _Prompt] = {}
        meter = telemetry.meter
        counter = meter.create_counter
        self._computed = counter("baton.prefill.tokens", description="Prompt tokens computed.")
        self._queried = counter("baton.prefix.query.tokens", description="Tokens looked up.")
        self._hit = counter("baton.prefix.hit.tokens", description="Tokens found computed.")
        self._borrowed = counter("baton.prefix.borrowed.tokens", description="Tokens lent to us.")
        self._failed = counter("baton.prompts.failed", description="Prompts without a first token.")
        self._cancelled = counter("baton.prompts.cancelled", description="Prompts given up.")
        self._sent_bytes = counter("baton.transfer.sent", unit="By", description="KV sent.")
        self._send_time = seconds_histogram(
            meter,
            "baton.transfer.send.duration",
            "From the first KV to the receiver's word that it has all.",
        )
        self._compute_time = seconds_histogram(
            meter, "baton.prefill.duration", "From a prompt's first chunk to its first token."
        )

        for counted in (self._computed, self._borrowed, self._sent_bytes):
            counted.add(0)
        for state in _STATES:
            self._cancelled.add(0, {names.STATE: state})

    def on_command(self, command: PrefillCommand) -> None:
        """A command goes to the core."""
        self._log.put(command)

    def on_step(self, events: Sequence[PrefillEvent]) -> None:
        """The core made a step. A handoff's end may be known here before the event that it followed."""
        done: list[tuple[float, SendDone]] = []
        for at_s, command in self._log.take():
            match command:
                case Submit(key, spec, ticket):
                    parent = context_of(spec.traceparent, spec.tracestate)
                    self._prompts[key] = _Prompt(spec, parent, bool(ticket), at_s)
                case Abort(key):
                    self._give_up(key, at_s)
                case SendDone():
                    done.append((at_s, command))
        for event in events:
            match event:
                case Prefilled():
                    self._computed_one(event)
                case PrefillFailed():
                    self._failed_one(event)
        for at_s, send_done in done:
            self._sent_one(at_s, send_done)

    def _computed_one(self, event: Prefilled) -> None:
        prompt = self._prompts.get(event.key)
        if prompt is None:
            return
        num_tokens = prompt.spec.num_tokens
        num_known = event.num_cached_tokens + event.num_borrowed_tokens
        self._computed.add(num_tokens - num_known)
        self._queried.add(num_tokens)
        self._hit.add(event.num_cached_tokens)
        self._borrowed.add(event.num_borrowed_tokens)
        self._compute_time.record(event.compute_s)
        chunks = event.chunks
        started_s = chunks[0].begin_s if chunks else prompt.submitted_s + event.queue_s
        ended_s = started_s + event.compute_s
        prompt.sending_s = min(chunks[0].end_s, ended_s) if chunks else ended_s
        if self._telemetry.has_traces:
            self._trace_prefill(prompt, event, started_s, ended_s)
        if not prompt.has_ticket or event.is_over:
            del self._prompts[event.key]
        elif prompt.done is not None:
            self._finish(event.key, prompt, *prompt.done)

    def _trace_prefill(
        self, prompt: _Prompt, event: Prefilled, started_s: float, ended_s: float
    ) -> None:
        writer = self._writer()
        writer.write(SpanName.PREFILL_QUEUE, prompt.parent, prompt.submitted_s, started_s)
        context = writer.write(
            SpanName.PREFILL,
            prompt.parent,
            started_s,
            ended_s,
            kind=SpanKind.SERVER,
            attributes={
                names.REQUEST_ID: prompt.spec.request_id,
                names.NUM_TOKENS: prompt.spec.num_tokens,
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

    def _failed_one(self, event: PrefillFailed) -> None:
        prompt = self._prompts.pop(event.key, None)
        if prompt is None:
            return
        self._failed.add(1, {names.REASON: event.error.reason})
        if self._telemetry.has_traces:
            self._writer().write(
                SpanName.PREFILL,
                prompt.parent,
                prompt.submitted_s,
                self._clock(),
                kind=SpanKind.SERVER,
                attributes={names.REQUEST_ID: prompt.spec.request_id},
                events=((RequestEvent.FAILED, self._clock()),),
                error=event.error.reason,
            )

    def _give_up(self, key: str, at_s: float) -> None:
        prompt = self._prompts.pop(key, None)
        if prompt is None:
            return
        state = _STATES[prompt.sending_s is not None]
        self._cancelled.add(1, {names.STATE: state})
        if self._telemetry.has_traces:
            self._writer().write(
                SpanName.SEND if prompt.sending_s is not None else SpanName.PREFILL,
                prompt.parent,
                prompt.submitted_s if prompt.sending_s is None else prompt.sending_s,
                at_s,
                attributes={names.REQUEST_ID: prompt.spec.request_id},
                events=((RequestEvent.CANCELLED, at_s),),
                error=Cancelled.reason,
            )

    def _sent_one(self, at_s: float, done: SendDone) -> None:
        self._sent_bytes.add(done.num_bytes)
        prompt = self._prompts.get(done.key)
        if prompt is None:
            return
        if prompt.sending_s is not None:
            self._finish(done.key, prompt, at_s, done)
        elif done.error is None:
            prompt.done = (at_s, done)

    def _finish(self, key: str, prompt: _Prompt, at_s: float, done: SendDone) -> None:
        del self._prompts[key]
        start_s = at_s if prompt.sending_s is None else prompt.sending_s
        if done.error is None:
            self._send_time.record(max(0.0, at_s - start_s))
        if self._telemetry.has_traces:
            event = RequestEvent.ABORTED if done.error else RequestEvent.COMMITTED
            self._writer().write(
                SpanName.SEND,
                prompt.parent,
                start_s,
                at_s,
                kind=SpanKind.PRODUCER,
                attributes={
                    names.REQUEST_ID: prompt.spec.request_id,
                    names.TRANSFER_BYTES: done.num_bytes,
                },
                events=((event, at_s),),
                error=done.error.reason if done.error else "",
            )

    def _writer(self) -> SpanWriter:
        return SpanWriter(self._telemetry.tracer, WallClock.of(self._clock))

"""Spans: their W3C trace context, their times, and the writing of spans that have ended already."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.trace import (
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from baton.telemetry.names import ERROR_TYPE, RequestEvent

#: Maximum characters of a tracestate passed on; W3C requires at least 512. The oldest entries
#: beyond it are dropped.
MAX_TRACESTATE_CHARS = 512

_KEYS = frozenset({"traceparent", "tracestate"})

Attributes = Mapping[str, str | int | float | bool | tuple[str, ...]]
#: (event, seconds on a monotonic clock).
TimedEvent = tuple[RequestEvent, float]


@dataclass(frozen=True, slots=True)
class WallClock:
    """Converts moments of a monotonic clock to wall time. Differences are preserved even if the
    wall clock is set."""

    offset_ns: int

    @classmethod
    def of(cls, clock: Callable[[], float]) -> WallClock:
        """Return a conversion based on both clocks' current values."""
        return cls(time.time_ns() - int(clock() * 1e9))

    def ns(self, moment_s: float) -> int:
        """Nanoseconds since the epoch."""
        return self.offset_ns + int(moment_s * 1e9)


@dataclass(frozen=True, slots=True)
class SpanWriter:
    """Writes the spans of one process. Times are moments of the clock of `wall`."""

    tracer: Tracer
    wall: WallClock

    def write(
        self,
        name: str,
        parent: Context,
        start_s: float,
        end_s: float,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes | None = None,
        events: Iterable[TimedEvent] = (),
        error: str = "",
    ) -> Context:
        """Write a span and return its context, for children. error: the failure's reason, never its
        message."""
        span = self.tracer.start_span(
            name, parent, kind=kind, attributes=attributes, start_time=self.wall.ns(start_s)
        )
        if span.is_recording():
            for event, at_s in events:
                span.add_event(event.value, timestamp=self.wall.ns(at_s))
            if error:
                set_error(span, error)
        span.end(self.wall.ns(max(start_s, end_s)))
        return set_span_in_context(span, parent)


def set_error(span: Span, reason: str) -> None:
    """Mark a span as failed. reason: a key of baton.errors.BY_REASON; a message could quote user
    text."""
    span.set_attribute(ERROR_TYPE, reason)
    span.set_status(Status(StatusCode.ERROR))


def context_of_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> Context:
    """The caller's trace context; empty if it is missing or malformed."""
    carrier = {
        key: value for key, value in metadata or () if key in _KEYS and isinstance(value, str)
    }
    return TraceContextTextMapPropagator().extract(carrier, Context()) if carrier else Context()


def context_of(traceparent: str, tracestate: str = "") -> Context:
    """Parse a trace context; empty if traceparent is empty or malformed."""
    if not traceparent:
        return Context()
    carrier = {"traceparent": traceparent, "tracestate": tracestate}
    return TraceContextTextMapPropagator().extract(carrier, Context())


def trace_of(span: SpanContext) -> tuple[str, str]:
    """Return (traceparent, tracestate) for the next process; empty strings without a trace.
    tracestate: vendor entries, latest first."""
    if not span.is_valid:
        return "", ""
    kept = ""
    for key, value in span.trace_state.items():
        longer = f"{kept},{key}={value}".removeprefix(",")
        if len(longer) > MAX_TRACESTATE_CHARS:
            break
        kept = longer
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}", kept

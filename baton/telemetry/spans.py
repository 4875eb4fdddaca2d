"""Spans: the trace they belong to, passed on as W3C trace context; their times; and writing those
that are over already."""

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

#: Length of a tracestate that is passed on; W3C asks for 512 characters at least. Entries beyond,
#: the oldest, are dropped.
MAX_TRACESTATE_CHARS = 512

_KEYS = frozenset({"traceparent", "tracestate"})

Attributes = Mapping[str, str | int | float | bool | tuple[str, ...]]
#: What happened, and when, by a monotonic clock in seconds.
TimedEvent = tuple[RequestEvent, float]


@dataclass(frozen=True, slots=True)
class WallClock:
    """Converts moments, in seconds, of the clock it was made for. Within one of these, differences
    stay what they were, even if the wall clock is set meanwhile."""

    offset_ns: int

    @classmethod
    def of(cls, clock: Callable[[], float]) -> WallClock:
        """What `clock`'s moments are by the wall clock of now."""
        return cls(time.time_ns() - int(clock() * 1e9))

    def ns(self, moment_s: float) -> int:
        """The moment in nanoseconds since the epoch."""
        return self.offset_ns + int(moment_s * 1e9)


@dataclass(frozen=True, slots=True)
class SpanWriter:
    """Spans of one process, their times by a clock that `wall` knows."""

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
        """Write a span; the context of it, for its children. error: the reason of a failure, never
        its message."""
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
    """Mark a span as failed. `reason` is one of baton.errors.BY_REASON: a status text could repeat
    a user's."""
    span.set_attribute(ERROR_TYPE, reason)
    span.set_status(Status(StatusCode.ERROR))


def context_of_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> Context:
    """The caller's trace context; an empty one if there is none, or if it is malformed."""
    carrier = {
        key: value for key, value in metadata or () if key in _KEYS and isinstance(value, str)
    }
    return TraceContextTextMapPropagator().extract(carrier, Context()) if carrier else Context()


def context_of(traceparent: str, tracestate: str = "") -> Context:
    """The context that these name; an empty one if traceparent is empty or malformed."""
    if not traceparent:
        return Context()
    carrier = {"traceparent": traceparent, "tracestate": tracestate}
    return TraceContextTextMapPropagator().extract(carrier, Context())


def trace_of(span: SpanContext) -> tuple[str, str]:
    """traceparent, which the next process continues, and tracestate, what vendors added to the
    trace, the latest first; empty if there is no trace."""
    if not span.is_valid:
        return "", ""
    kept = ""
    for key, value in span.trace_state.items():
        longer = f"{kept},{key}={value}".removeprefix(",")
        if len(longer) > MAX_TRACESTATE_CHARS:
            break
        kept = longer
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}", kept

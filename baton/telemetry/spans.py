"""Writes spans that are over already: their beginning and end are known when they are told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context

from baton.telemetry.names import ERROR_TYPE, RequestEvent
from baton.telemetry.wall_clock import WallClock

Attributes = Mapping[str, str | int | float | bool | tuple[str, ...]]
#: What happened, and when, by a monotonic clock in seconds.
TimedEvent = tuple[RequestEvent, float]


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

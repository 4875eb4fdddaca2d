"""W3C trace context: from a client's metadata, on to the tiers and through the KV channel."""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry.context import Context
from opentelemetry.trace import SpanContext
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_KEYS = frozenset({"traceparent", "tracestate"})


def context_of_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> Context:
    """The caller's trace context; an empty one if there is none, or if it is malformed."""
    carrier = {
        key: value for key, value in metadata or () if key in _KEYS and isinstance(value, str)
    }
    return TraceContextTextMapPropagator().extract(carrier, Context())


def context_of(traceparent: str) -> Context:
    """The context that a traceparent names; an empty one if it is empty or malformed."""
    if not traceparent:
        return Context()
    return TraceContextTextMapPropagator().extract({"traceparent": traceparent}, Context())


def traceparent_of(span: SpanContext) -> str:
    """What the next process continues; empty if there is no trace."""
    if not span.is_valid:
        return ""
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"

"""W3C trace context: from a client's metadata, on to the tiers and through the KV channel."""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry.context import Context
from opentelemetry.trace import SpanContext
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

#: Length of a tracestate that is passed on; W3C asks for 512 characters at least. Entries beyond,
#: the oldest, are dropped.
MAX_TRACESTATE_CHARS = 512

_KEYS = frozenset({"traceparent", "tracestate"})


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


def traceparent_of(span: SpanContext) -> str:
    """What the next process continues; empty if there is no trace."""
    if not span.is_valid:
        return ""
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"


def tracestate_of(span: SpanContext) -> str:
    """What vendors added to the trace, the latest first; empty if there is no trace."""
    kept = ""
    for key, value in span.trace_state.items() if span.is_valid else ():
        longer = f"{kept},{key}={value}".removeprefix(",")
        if len(longer) > MAX_TRACESTATE_CHARS:
            break
        kept = longer
    return kept

"""The caller's trace, so that it goes on in the servers: W3C trace context of the current
OpenTelemetry span."""

from __future__ import annotations

import sys

#: Of a tracestate that is sent; a longer one stays here, where the trace goes on without it.
MAX_TRACESTATE_CHARS = 512


def current_trace() -> tuple[tuple[str, str], ...]:
    """Metadata for a call that is made now; none outside of a span."""
    if "opentelemetry.trace" not in sys.modules:
        # A span exists only where the program has imported OpenTelemetry, which this package does
        # without.
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return tuple(
        (key, value)
        for key, value in carrier.items()
        if key != "tracestate" or len(value) <= MAX_TRACESTATE_CHARS
    )

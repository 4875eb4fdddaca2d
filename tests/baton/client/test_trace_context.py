"""The caller's span goes with each call, and nothing else of its context."""

from __future__ import annotations

import asyncio

import pytest
from opentelemetry import baggage, context
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState, use_span

from baton.client.calls import MAX_TRACESTATE_CHARS, Settings

TRACEPARENT = f"00-{0xABC:032x}-{0xDEF:016x}-01"


def span(tracestate: str = "") -> NonRecordingSpan:
    state = TraceState.from_header([tracestate]) if tracestate else TraceState()
    flags = TraceFlags(TraceFlags.SAMPLED)
    return NonRecordingSpan(SpanContext(0xABC, 0xDEF, False, flags, state))


def sent(metadata: tuple[tuple[str, str], ...] = ()) -> dict[str, str]:
    return dict(Settings.of("a:1", 1.0, metadata, 0).call_metadata("r"))


def test_outside_of_a_span_nothing_is_sent() -> None:
    assert sent() == {"x-request-id": "r"}


def test_the_current_span_is_named_but_not_what_else_the_program_knows() -> None:
    token = context.attach(baggage.set_baggage("user", "secret"))
    try:
        with use_span(span("a=1,b=2")):
            assert sent() == {
                "x-request-id": "r",
                "traceparent": TRACEPARENT,
                "tracestate": "a=1,b=2",
            }
    finally:
        context.detach(token)


def test_metadata_of_the_clients_own_go_before() -> None:
    other = TRACEPARENT.replace("abc", "abd")
    with use_span(span("a=1")):
        assert sent((("traceparent", other),)) == {"x-request-id": "r", "traceparent": other}


@pytest.mark.parametrize("num_chars", [MAX_TRACESTATE_CHARS, MAX_TRACESTATE_CHARS + 1])
def test_a_long_tracestate_is_no_reason_to_refuse_a_call(num_chars: int) -> None:
    parts = [f"{name}={'x' * 198}" for name in "ab"]
    tracestate = ",".join([*parts, f"c={'x' * (num_chars - 404)}"])
    assert len(tracestate) == num_chars
    with use_span(span(tracestate)):
        assert sent()["traceparent"] == TRACEPARENT
        assert ("tracestate" in sent()) == (num_chars <= MAX_TRACESTATE_CHARS)


async def test_tasks_send_each_their_own_span() -> None:
    async def one(span_id: int) -> str:
        with use_span(NonRecordingSpan(SpanContext(1, span_id, False))):
            await asyncio.sleep(0)
            return sent()["traceparent"]

    traces = await asyncio.gather(*(one(number) for number in (1, 2, 3)))
    assert traces == [f"00-{1:032x}-{number:016x}-00" for number in (1, 2, 3)]

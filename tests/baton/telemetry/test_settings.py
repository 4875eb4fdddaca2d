"""When telemetry is on, by which variables and options, and what it says when it cannot be."""

from __future__ import annotations

import re
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import SpanContext, TraceState, get_current_span

from baton.config import ServeOptions
from baton.errors import ConfigError
from baton.supervisor.plan import metrics_port, plan_gateways, plan_workers
from baton.telemetry import Phase, RequestEvent, TelemetrySettings, names, open_telemetry
from baton.telemetry.names import SpanName
from baton.telemetry.spans import (
    MAX_TRACESTATE_CHARS,
    context_of,
    context_of_metadata,
    trace_of,
)
from baton.telemetry.telemetry import close_within
from kv_transfer.ticket import TicketState
from tests.support.metrics_page import fetch_metrics, free_ports

SETTINGS = TelemetrySettings(service="gateway", instance="g0", version="1", model="m")


def settings(port: int, compat: str = "none") -> TelemetrySettings:
    return TelemetrySettings("gateway", "g0", "1", "m", metrics_port=port, metrics_compat=compat)


def test_nothing_is_on_by_default() -> None:
    telemetry = open_telemetry(SETTINGS, {})
    assert not telemetry.is_on
    span = telemetry.tracer.start_span("x")
    assert not span.is_recording()
    assert trace_of(span.get_span_context()) == ("", "")
    telemetry.close()


@pytest.mark.parametrize(
    ("environ", "has_traces", "has_metrics"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False, False),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1"}, True, False),
        (
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1",
                "OTEL_METRICS_EXPORTER": "none",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
            },
            True,
            False,
        ),
        (
            {
                "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://127.0.0.1:1",
                "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/protobuf",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "",
            },
            False,
            True,
        ),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
            False,
            False,
        ),
    ],
)
def test_the_standard_variables_decide(
    environ: dict[str, str], has_traces: bool, has_metrics: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    telemetry = open_telemetry(SETTINGS, environ)
    try:
        assert (telemetry.has_traces, telemetry.has_metrics) == (has_traces, has_metrics)
    finally:
        telemetry.close()


@pytest.mark.parametrize(
    "environ",
    [
        {"OTEL_EXPORTER_OTLP_PROTOCOL": "http"},
        {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"},
        {"OTEL_TRACES_EXPORTER": "zipkin"},
        {"OTEL_METRICS_EXPORTER": "prometheus"},
    ],
)
def test_what_is_not_here_is_refused_by_name_value_and_fix(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as refused:
        open_telemetry(SETTINGS, environ)
    ((name, value),) = environ.items()
    assert name in refused.value.message
    assert value in refused.value.message
    assert "use " in refused.value.message


@pytest.mark.slow
def test_a_taken_port_is_refused_and_nothing_stays_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
        with pytest.raises(ConfigError) as refused:
            open_telemetry(settings(port), {})
    assert "metrics_port" in refused.value.message or "metrics-port" in refused.value.message
    telemetry = open_telemetry(settings(port), {})
    telemetry.close()


@pytest.mark.slow
async def test_a_port_serves_until_it_is_closed() -> None:
    (port,) = free_ports(1)
    telemetry = open_telemetry(settings(port), {})
    telemetry.meter.create_counter("baton.resumes").add(3)
    assert 'baton_resumes_total{baton_tier="gateway"} 3.0' in await fetch_metrics(port)
    telemetry.close()
    with pytest.raises(OSError, match="refused"):
        await fetch_metrics(port)


def test_a_collector_that_does_not_answer_holds_up_no_stop() -> None:
    silent, closed = threading.Event(), threading.Event()
    close_within([lambda: bool(silent.wait()), closed.set], timeout_s=0.05)
    assert not silent.is_set()
    assert closed.wait()
    silent.set()


def test_names_are_those_of_the_conventions() -> None:
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
    from opentelemetry.semconv._incubating.metrics import gen_ai_metrics

    known = {v for v in vars(gen_ai_attributes).values() if isinstance(v, str)}
    ours = {
        value
        for name, value in vars(names).items()
        if name.isupper() and isinstance(value, str) and value.startswith("gen_ai.")
    }
    # Advised by the conventions since semconv 0.66; the package may not have it yet.
    assert ours - known <= {"gen_ai.response.time_to_first_chunk"}
    assert gen_ai_metrics.GEN_AI_SERVER_REQUEST_DURATION == "gen_ai.server.request.duration"
    assert gen_ai_metrics.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN == "gen_ai.server.time_to_first_token"


def test_events_speak_the_words_of_the_handoffs_states() -> None:
    assert {state.value for state in TicketState} <= {event.value for event in RequestEvent}
    for kind in (Phase, RequestEvent, SpanName):
        assert all(re.fullmatch(r"[a-z_ ]+", member.value) for member in kind)


@pytest.mark.parametrize("text", ["", "00-", "x" * 500, "00-" + "0" * 32 + "-" + "1" * 16 + "-01"])
def test_a_broken_context_is_no_context(text: str) -> None:
    assert not context_of(text)
    assert not context_of_metadata((("traceparent", text), ("grpc-bin", b"\xff")))


@given(
    entries=st.dictionaries(
        st.text("abc", min_size=1, max_size=8), st.text("xyz ", max_size=60).map(lambda v: f"{v}.")
    )
)
def test_a_tracestate_is_carried_on_up_to_a_length_and_in_whole_entries(
    entries: dict[str, str],
) -> None:
    span = SpanContext(1, 2, is_remote=False, trace_state=TraceState([*entries.items()]))
    traceparent, text = trace_of(span)
    assert len(text) <= MAX_TRACESTATE_CHARS
    whole = TraceState([*entries.items()]).to_header()
    assert whole == text or whole.startswith(f"{text},") or not text
    assert text == whole or len(whole) > MAX_TRACESTATE_CHARS
    context = context_of(traceparent, text)
    assert trace_of(get_current_span(context).get_span_context())[1] == text


def test_each_child_of_serve_has_a_port_of_its_own() -> None:
    options = ServeOptions(
        model="m", metrics_port=9464, num_gateways=2, num_prefill_workers=2, num_decode_workers=2
    )
    children = (*plan_gateways(options), *plan_workers(options, 2))
    ports = [
        next(a for a in child.arguments if a.startswith("--metrics-port=")) for child in children
    ]
    assert ports == [f"--metrics-port={9464 + i}" for i in range(6)]
    assert metrics_port(ServeOptions(model="m"), "gateway") == 0

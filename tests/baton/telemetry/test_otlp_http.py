"""Traces and metrics over HTTP: the same ones, at the paths of OTLP, if that protocol is asked
for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from baton.client import SamplingParams
from tests.support.live_tiers import live_system
from tests.support.otlp_receiver import OtlpReceiver, otlp_http_receiver, otlp_receiver

PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    with otlp_http_receiver() as seen:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{seen.address}/base")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        yield seen


@pytest.mark.slow
async def test_one_trace_of_all_processes_and_their_metrics_come_over_http(
    web: OtlpReceiver,
) -> None:
    async with live_system() as system:
        await system.client.generate(list(range(50)), PARAMS)
    assert web.paths == {"/base/v1/traces", "/base/v1/metrics"}
    (spans,) = web.traces().values()
    assert {span.service for span in spans} == {"baton-gateway", "baton-prefill", "baton-decode"}
    assert "gen_ai.server.request.duration" in web.metric_names


@pytest.mark.slow
async def test_each_signal_may_have_a_protocol_of_its_own(
    web: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with otlp_receiver() as rpc:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "grpc")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", f"http://{rpc.address}")
        async with live_system() as system:
            await asyncio.gather(
                *(system.client.generate([index, *range(20)], PARAMS) for index in range(3))
            )
    assert web.paths == {"/base/v1/traces"}
    assert len(web.traces()) == 3
    assert not rpc.spans
    assert "gen_ai.server.request.duration" in rpc.metric_names

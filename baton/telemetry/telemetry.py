"""One process's tracer and meter, made at its start from the standard OTEL_ variables and its
options.

Traces and metrics go by OTLP if OTEL_EXPORTER_OTLP_ENDPOINT, or the one of the signal, is set;
metrics also to a Prometheus port if there is one. Without any of these all is a no-op. Nothing is
registered globally.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from opentelemetry.metrics import Meter, NoOpMeter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import NoOpTracer, Tracer

from baton.telemetry import names
from baton.telemetry.metrics import ObservableHistograms, SdkHistograms, SecondsHistograms
from baton.telemetry.otlp import (
    OtlpProtocol,
    metric_reader,
    needs_sdk_histograms,
    otlp_protocol,
    span_exporter,
)

if TYPE_CHECKING:
    from baton.telemetry.prometheus import Pages, PrometheusMetrics

_SCOPE = "baton"

#: Time, in seconds, that the last export may take when a process stops.
CLOSE_TIMEOUT_S = 3.0

_NO_PAGES: Pages = MappingProxyType({})

Closers = list[Callable[[], None]]


@dataclass(frozen=True, slots=True)
class TelemetrySettings:
    """Who reports, and where metrics can be fetched.

    service: "gateway", "prefill" or "decode". instance: the process's own name. metrics_port: of
    the Prometheus exporter, on metrics_host; 0 for none. metrics_compat: "vllm" adds vLLM's metric
    names there; "none" does not.
    """

    service: str
    instance: str
    version: str
    model: str
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0
    metrics_compat: str = "none"
    has_page: bool = False


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What a process's recorders write to. `close` exports what is left, for at most
    CLOSE_TIMEOUT_S."""

    tracer: Tracer
    meter: Meter
    histograms: SecondsHistograms
    has_traces: bool
    has_metrics: bool
    close: Callable[[], None]
    prometheus: PrometheusMetrics | None = None
    """None where nobody is to fetch them."""

    @property
    def is_on(self) -> bool:
        return self.has_traces or self.has_metrics


def no_telemetry() -> Telemetry:
    """Reports nothing, and costs nothing."""
    meter = NoOpMeter(_SCOPE)
    return Telemetry(NoOpTracer(), meter, SdkHistograms(meter), False, False, lambda: None)


def open_telemetry(
    settings: TelemetrySettings,
    environ: Mapping[str, str] | None = None,
    *,
    pages: Pages = _NO_PAGES,
) -> Telemetry:
    """Open the exporters that are asked for. The exporters read further OTEL_ variables by
    themselves.

    pages: served beside the metrics, if there is a port.

    Raises ConfigError for an exporter or a protocol that is not here, or a metrics port that is
    taken.
    """
    environ = os.environ if environ is None else environ
    traces, metrics = otlp_protocol("TRACES", environ), otlp_protocol("METRICS", environ)
    resource = _resource(settings, environ)
    closers: Closers = []
    readers: list[MetricReader] = []
    histograms = ObservableHistograms(InstrumentationScope(_SCOPE, settings.version))
    # What may be refused comes first, so that nothing is open then.
    prometheus = None
    if settings.metrics_port or settings.has_page:
        prometheus = _open_prometheus(settings, histograms, pages, closers)
        readers.append(prometheus.reader)
    if metrics:
        readers.append(metric_reader(metrics, histograms))
    meter = _open_metrics(resource, readers, settings, closers) if readers else NoOpMeter(_SCOPE)
    tracer = _open_traces(resource, traces, settings, closers) if traces else None
    return Telemetry(
        tracer=tracer or NoOpTracer(),
        meter=meter,
        histograms=SdkHistograms(meter) if needs_sdk_histograms(environ) else histograms,
        has_traces=tracer is not None,
        has_metrics=bool(readers),
        close=lambda: close_within(closers, CLOSE_TIMEOUT_S),
        prometheus=prometheus,
    )


@asynccontextmanager
async def running_telemetry(
    settings: TelemetrySettings, *, pages: Pages = _NO_PAGES
) -> AsyncIterator[Telemetry]:
    """Telemetry by this process's environment; at the end what is left is exported, outside of the
    event loop."""
    telemetry = open_telemetry(settings, pages=pages)
    try:
        yield telemetry
    finally:
        if telemetry.is_on:
            await asyncio.to_thread(telemetry.close)


def _resource(settings: TelemetrySettings, environ: Mapping[str, str]) -> Resource:
    attributes: dict[str, str | int] = {
        "service.namespace": "baton",
        "service.instance.id": settings.instance,
        "service.version": settings.version,
        names.TIER: settings.service,
        "process.pid": os.getpid(),
    }
    named = "service.name" in environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    if not environ.get("OTEL_SERVICE_NAME") and not named:
        attributes["service.name"] = f"baton-{settings.service}"
    return Resource.create(attributes)


def _open_traces(
    resource: Resource, protocol: OtlpProtocol, settings: TelemetrySettings, closers: Closers
) -> Tracer:
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    closers.append(provider.shutdown)
    provider.add_span_processor(BatchSpanProcessor(span_exporter(protocol)))
    return provider.get_tracer(_SCOPE, settings.version)


def _open_prometheus(
    settings: TelemetrySettings, histograms: ObservableHistograms, pages: Pages, closers: Closers
) -> PrometheusMetrics:
    # Most workers have no port for it, and need not wait for the import.
    from baton.telemetry.prometheus import prometheus_metrics, serve_prometheus

    vllm_model = settings.model if settings.metrics_compat == "vllm" else None
    metrics = prometheus_metrics(histograms, vllm_model)
    if settings.metrics_port:
        closers.append(
            serve_prometheus(metrics, settings.metrics_host, settings.metrics_port, pages)
        )
    return metrics


def _open_metrics(
    resource: Resource, readers: list[MetricReader], settings: TelemetrySettings, closers: Closers
) -> Meter:
    provider = MeterProvider(readers, resource, shutdown_on_exit=False)
    closers.append(provider.shutdown)
    return provider.get_meter(_SCOPE, settings.version)


def close_within(closers: Sequence[Callable[[], None]], timeout_s: float) -> None:
    """Call all at once, and return when they are done, or after `timeout_s`: a collector that does
    not answer is not waited for. What is late then ends with the process."""
    deadline_s = time.monotonic() + timeout_s
    threads = [
        threading.Thread(target=closer, name="telemetry-close", daemon=True) for closer in closers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))

"""Which signals go by OTLP, and over which protocol, by the standard OTEL_ variables; and the
exporters for it."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from opentelemetry.sdk.metrics.export import (
    MetricExporter,
    MetricReader,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.trace.export import SpanExporter

from baton.errors import ConfigError
from baton.telemetry.metrics import HistogramReader, ObservableHistograms

_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


class OtlpProtocol(enum.Enum):
    """Values of OTEL_EXPORTER_OTLP_PROTOCOL that are here. Collectors take them at 4317 and at
    4318."""

    GRPC = "grpc"
    HTTP = "http/protobuf"


def otlp_protocol(signal: str, environ: Mapping[str, str]) -> OtlpProtocol | None:
    """The protocol by which "TRACES" or "METRICS" are exported; None if they are not. gRPC unless
    another is asked for.

    An empty variable counts as unset, as OpenTelemetry has it. Raises ConfigError for an exporter
    or a protocol that is not here.
    """
    protocol = _protocol(signal, environ)
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    exporter = environ.get(f"OTEL_{signal}_EXPORTER") or "otlp"
    if exporter == "none":
        return None
    if exporter != "otlp":
        raise ConfigError.of(
            f"OTEL_{signal}_EXPORTER", exporter, "use otlp or none; Prometheus is --metrics-port"
        )
    endpoint = environ.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT") or environ.get(_ENDPOINT)
    return protocol if endpoint else None


def span_exporter(protocol: OtlpProtocol) -> SpanExporter:
    """Where to, and how, it reads from further OTEL_ variables by itself."""
    # Imported here and below: a process does not pay for what it does not use.
    if protocol is OtlpProtocol.HTTP:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
            OTLPSpanExporter as HttpSpanExporter,
        )

        return HttpSpanExporter()
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


class _Reader(HistogramReader, PeriodicExportingMetricReader):
    """With our histograms."""


def metric_reader(protocol: OtlpProtocol, histograms: ObservableHistograms) -> MetricReader:
    """Exports by itself, each OTEL_METRIC_EXPORT_INTERVAL."""
    return _Reader(histograms, _metric_exporter(protocol))


def needs_sdk_histograms(environ: Mapping[str, str]) -> bool:
    """Whether the variables ask for what our histograms cannot report: exponential buckets, or
    exemplars of requests that are not traced."""
    aggregation = environ.get("OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION")
    exemplars = environ.get("OTEL_METRICS_EXEMPLAR_FILTER")
    return aggregation == "base2_exponential_bucket_histogram" or exemplars == "always_on"


def _metric_exporter(protocol: OtlpProtocol) -> MetricExporter:
    """As span_exporter."""
    if protocol is OtlpProtocol.HTTP:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import (
            OTLPMetricExporter as HttpMetricExporter,
        )

        return HttpMetricExporter()
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

    return OTLPMetricExporter()


def _protocol(signal: str, environ: Mapping[str, str]) -> OtlpProtocol:
    for name in (f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if value := environ.get(name):
            try:
                return OtlpProtocol(value)
            except ValueError:
                known = " or ".join(protocol.value for protocol in OtlpProtocol)
                fix = f"use {known}, and the collector's port for it"
                raise ConfigError.of(name, value, fix) from None
    return OtlpProtocol.GRPC

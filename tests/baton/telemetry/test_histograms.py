"""Histograms that are read with the metrics, beside OpenTelemetry's own for the same records."""

from __future__ import annotations

import math
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.sdk.metrics import Histogram, MeterProvider
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    InMemoryMetricReader,
    MetricReader,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from baton.telemetry import TelemetrySettings, names, open_telemetry
from baton.telemetry.metrics import (
    SEQUENCE_BOUNDS_S,
    HistogramReader,
    ObservableHistograms,
    SdkHistograms,
    SecondsHistograms,
    observe_build,
)
from baton.telemetry.otlp import OtlpProtocol, metric_reader
from baton.telemetry.prometheus import PrometheusMetrics, prometheus_metrics
from tests.support.otlp_receiver import OtlpReceiver, otlp_http_receiver

NEVER_MS = str(10**9)
SETTINGS = TelemetrySettings(service="gateway", instance="g0", version="1", model="m")

ATTRIBUTES: tuple[dict[str, str], ...] = (
    {},
    {"baton.phase": "queue"},
    {"baton.phase": "tokenize"},
    {"gen_ai.request.model": "m", "error.type": 'a "b" \\ c\nd'},
    {"error.type": 'a "b" \\ c\nd', "gen_ai.request.model": "m"},
)
#: Sums of these are exact in any order; on boundaries, between them, and beyond the last.
AMOUNTS = (0.0, 0.25, 0.5, 0.75, 1.0, 2.5, 4.0, 10.0, 64.0, 1 / 1024)
#: Not recorded.
REFUSED = (-0.25, math.inf, math.nan)

Record = tuple[int, float, dict[str, str]]


class _InMemory(HistogramReader, InMemoryMetricReader):
    """Stays in this process."""


@dataclass
class Meters:
    """Two histograms of one provider, beside a gauge."""

    provider: MeterProvider
    histograms: SecondsHistograms

    def __post_init__(self) -> None:
        bounds = (0.25, 1.0, 4.0)
        self._histograms = (
            self.histograms.create("baton.transfer.duration", 'The "first" one.'),
            self.histograms.create("gen_ai.server.request.duration", "The second.", bounds),
        )

    def record(self, records: list[Record]) -> None:
        for which, amount, attributes in records:
            self._histograms[which].record(amount, attributes)


def meters_of(reader: MetricReader, histograms: ObservableHistograms, *, sdk: bool) -> Meters:
    resource = Resource({"service.name": "s", names.TIER: "gateway"})
    provider = MeterProvider([reader], resource, shutdown_on_exit=False)
    scope = histograms.scope
    meter = provider.get_meter(scope.name, scope.version)
    observe_build(meter, "1")
    return Meters(provider, SdkHistograms(meter) if sdk else histograms)


def new_histograms() -> ObservableHistograms:
    return ObservableHistograms(InstrumentationScope("baton", "1"))


def records_of(rng: random.Random, count: int) -> list[Record]:
    amounts = (*AMOUNTS, *REFUSED)
    return [
        (rng.randrange(2), rng.choice(amounts), dict(rng.choice(ATTRIBUTES))) for _ in range(count)
    ]


def rounds_of(seed: int) -> list[list[Record]]:
    """Records between collections; in one case none."""
    rng = random.Random(seed)
    return [records_of(rng, count) for count in (40, 3, 0, 25)]


# Prometheus


@pytest.mark.parametrize("seed", range(5))
def test_prometheus_gets_the_same_text(seed: int) -> None:
    def pages(*, sdk: bool) -> Iterator[set[str]]:
        histograms = new_histograms()
        metrics: PrometheusMetrics = prometheus_metrics(histograms, "m")
        meters = meters_of(metrics.reader, histograms, sdk=sdk)
        for records in rounds_of(seed):
            meters.record(records)
            text = metrics.page()[0].decode()
            lines = text.splitlines()
            assert len(set(lines)) == len(lines)
            yield set(lines)
        meters.provider.shutdown()

    own, theirs = list(pages(sdk=False)), list(pages(sdk=True))
    assert own == theirs
    assert any("gen_ai_server_request_duration_seconds_bucket" in line for line in own[0])


# OTLP


@dataclass
class Exported:
    """Points of one export by their metric and attributes, and all else of it."""

    points: dict[tuple[str, ...], Any]
    shapes: dict[str, tuple[Any, ...]]


def exported(message: bytes) -> Exported:
    points: dict[tuple[str, ...], Any] = {}
    shapes: dict[str, tuple[Any, ...]] = {}
    (resource,) = ExportMetricsServiceRequest.FromString(message).resource_metrics
    (scope,) = resource.scope_metrics
    assert scope.scope.name == "baton"
    for metric in scope.metrics:
        kind = metric.WhichOneof("data")
        data = getattr(metric, kind)
        temporality = getattr(data, "aggregation_temporality", None)
        assert metric.name not in shapes
        shapes[metric.name] = (metric.description, metric.unit, kind, temporality)
        for point in data.data_points:
            attributes = sorted((one.key, one.value.string_value) for one in point.attributes)
            points[(metric.name, *(f"{key}={value}" for key, value in attributes))] = point
    return Exported(points, shapes)


def without_times(point: Any) -> Any:
    copy = type(point)()
    copy.CopyFrom(point)
    copy.start_time_unix_nano = copy.time_unix_nano = 0
    # Attributes that stand in another order are the same.
    attributes = sorted(copy.attributes, key=lambda one: str(one.key))
    del copy.attributes[:]
    copy.attributes.extend(attributes)
    return copy


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    with otlp_http_receiver() as seen:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{seen.address}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", NEVER_MS)
        yield seen


@contextmanager
def exporting(collector: OtlpReceiver, *, sdk: bool) -> Iterator[Callable[[list[Record]], None]]:
    """Records, and exports once."""
    histograms = new_histograms()
    meters = meters_of(metric_reader(OtlpProtocol.HTTP, histograms), histograms, sdk=sdk)

    def step(records: list[Record]) -> None:
        meters.record(records)
        meters.provider.force_flush()

    try:
        yield step
    finally:
        meters.provider.shutdown()
        collector.messages.pop()  # of the shutdown


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("preference", ["cumulative", "Delta", "lowmemory"])
@pytest.mark.parametrize("seed", range(2))
def test_otlp_gets_the_same_points(
    preference: str, seed: int, collector: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", preference)
    exports: dict[bool, list[Exported]] = {}
    for sdk in (False, True):
        with exporting(collector, sdk=sdk) as step:
            for records in rounds_of(seed):
                step(records)
        exports[sdk] = [exported(message) for message in collector.messages]
        collector.messages.clear()
    is_delta = preference != "cumulative"
    assert len(exports[False]) == len(exports[True]) == 4
    for own, theirs in zip(exports[False], exports[True], strict=True):
        assert own.shapes == theirs.shapes
        assert {key: without_times(point) for key, point in own.points.items()} == {
            key: without_times(point) for key, point in theirs.points.items()
        }
    assert ("baton.transfer.duration" in exports[False][2].shapes) is not is_delta


@pytest.mark.parametrize("sdk", [False, True])
@pytest.mark.parametrize("preference", ["cumulative", "delta"])
def test_intervals_join_or_begin_where_the_first_did(
    preference: str, sdk: bool, collector: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", preference)
    with exporting(collector, sdk=sdk) as step:
        for _ in range(3):
            step([(0, 0.5, {})])
    first, second, third = (
        exported(message).points[("baton.transfer.duration",)] for message in collector.messages
    )
    assert first.start_time_unix_nano <= first.time_unix_nano
    for before, after in ((first, second), (second, third)):
        assert before.time_unix_nano < after.time_unix_nano
        begin_ns = before.time_unix_nano if preference == "delta" else first.start_time_unix_nano
        assert after.start_time_unix_nano == begin_ns


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        (
            "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION",
            "base2_exponential_bucket_histogram",
            "exponential_histogram",
        ),
        (
            "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION",
            "explicit_bucket_histogram",
            "histogram",
        ),
        ("OTEL_METRICS_EXEMPLAR_FILTER", "always_on", "histogram"),
        ("OTEL_METRICS_EXEMPLAR_FILTER", "trace_based", "histogram"),
    ],
)
def test_what_the_variables_ask_for_is_exported(
    name: str, value: str, kind: str, collector: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    telemetry = open_telemetry(SETTINGS)
    observe_build(telemetry.meter, "1")
    telemetry.histograms.create("baton.transfer.duration", "One.").record(0.5, {"a": "b"})
    telemetry.close()
    metrics = exported(collector.messages[-1])
    assert metrics.shapes["baton.transfer.duration"][:3] == ("One.", "s", kind)
    point = metrics.points["baton.transfer.duration", "a=b"]
    assert (point.count, point.sum) == (1, 0.5)
    assert bool(point.exemplars) is (value == "always_on")


# Threads


def _points(data: Any, name: str) -> list[Any]:
    return [
        point
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == name
        for point in metric.data.data_points
    ]


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Threads take turns as often as they can."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval_s)


@pytest.mark.slow
@pytest.mark.usefixtures("eager_switches")
def test_what_is_collected_while_others_record_is_whole_records() -> None:
    num_threads, num_records = 2, 20_000
    histograms = new_histograms()
    delta = _InMemory(histograms, preferred_temporality={Histogram: AggregationTemporality.DELTA})
    total = _InMemory(histograms)
    provider = MeterProvider([delta, total], shutdown_on_exit=False)
    observe_build(provider.get_meter("baton", "1"), "1")
    histogram = histograms.create("baton.transfer.duration", "One.")

    def write() -> None:
        for index in range(num_records):
            # Pairs have different buckets, so that a sum that belongs to other counts shows.
            histogram.record(*((0.5, {"a": "b"}) if index % 2 else (8.0, {"a": "b"})))

    def checked(reader: _InMemory) -> list[int]:
        data = reader.get_metrics_data()
        points = _points(data, "baton.transfer.duration")
        for point in points:
            low, high = (
                point.bucket_counts[SEQUENCE_BOUNDS_S.index(bound)] for bound in (0.5, 10.0)
            )
            assert point.count == low + high
            assert point.sum == 0.5 * low + 8.0 * high
            assert point.min == (0.5 if low else 8.0)
            assert point.max == (8.0 if high else 0.5)
        return [point.count for point in points]

    writers = [threading.Thread(target=write) for _ in range(num_threads)]
    num_seen, last = 0, 0
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        num_seen += sum(checked(delta))
        now = sum(checked(total))
        assert now >= max(last, num_seen)
        last = now
    for writer in writers:
        writer.join()
    num_seen += sum(checked(delta))
    assert num_seen == sum(checked(total)) == num_threads * num_records

"""Counters common to all services, and histograms of times, collected on demand.

Recording adds to a few numbers under a lock; OpenTelemetry's histogram takes ten times as long, ten
times per request. OpenTelemetry has no observable histogram, unlike its counters and gauges, so the
readers here append these histograms to the metrics of its own instruments.
"""

from __future__ import annotations

import logging
import math
import platform
import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, Protocol

from opentelemetry.metrics import CallbackOptions, Meter, Observation
from opentelemetry.sdk.metrics import Histogram
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    HistogramDataPoint,
    Metric,
    MetricReader,
    MetricsData,
    ResourceMetrics,
)
from opentelemetry.sdk.metrics.export import Histogram as HistogramData
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from baton.types import PROTOCOL_VERSION, NumericsClass

_log = logging.getLogger(__name__)

#: Boundaries for a worker's work on one sequence's KV or prompt.
SEQUENCE_BOUNDS_S: Final = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip

_UNIT = "s"
_NO_ATTRIBUTES: Mapping[str, str] = MappingProxyType({})

_Key = frozenset[tuple[str, str]]


class SecondsHistogram(Protocol):
    """Counts times by bucket, for each set of attributes."""

    def record(self, amount: float, attributes: Mapping[str, str] = _NO_ATTRIBUTES) -> None: ...


class SecondsHistograms(Protocol):
    """Creates the histograms of a process. Names are unique."""

    def create(
        self, name: str, description: str, bounds: tuple[float, ...] = SEQUENCE_BOUNDS_S
    ) -> SecondsHistogram:
        """bounds: ascending, in seconds; each is included in the bucket below it."""


class SdkHistograms:
    """OpenTelemetry's histograms, which support all variables, including exponential buckets and
    exemplars."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def create(
        self, name: str, description: str, bounds: tuple[float, ...] = SEQUENCE_BOUNDS_S
    ) -> SecondsHistogram:
        return self._meter.create_histogram(
            name, _UNIT, description, explicit_bucket_boundaries_advisory=bounds
        )


class ObservableHistograms:
    """The histograms of one meter, in its scope. All readers must be added before the first
    histogram."""

    def __init__(self, scope: InstrumentationScope) -> None:
        self.scope = scope
        self._temporalities: list[AggregationTemporality] = []
        self._histograms: tuple[_Histogram, ...] = ()

    def create(
        self, name: str, description: str, bounds: tuple[float, ...] = SEQUENCE_BOUNDS_S
    ) -> SecondsHistogram:
        histogram = _Histogram(name, description, bounds, self._temporalities)
        self._histograms += (histogram,)  # replaced, because another thread reads it
        return histogram

    def add_reader(self, temporality: AggregationTemporality) -> int:
        """Return the reader's index for `collect`."""
        self._temporalities.append(temporality)
        return len(self._temporalities) - 1

    def collect(self, reader: int) -> list[Metric]:
        """Metrics with data for the reader."""
        now_ns = time.time_ns()
        metrics = (histogram.collect(reader, now_ns) for histogram in self._histograms)
        return [metric for metric in metrics if metric is not None]


class HistogramReader(MetricReader):
    """Mixin for a metric reader, placed before it: appends `histograms` to the metrics of the same
    meter's instruments, at least one of which must be observed at each collection, like a gauge."""

    def __init__(self, histograms: ObservableHistograms, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        preferred = (self._preferred_temporality or {}).get(Histogram)
        self._histograms = histograms
        self._reader = histograms.add_reader(preferred or AggregationTemporality.CUMULATIVE)

    def _receive_metrics(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **options: Any
    ) -> None:
        """Append the histograms. Overrides OpenTelemetry's hook for collected metrics."""
        resources = [self._with_histograms(one) for one in metrics_data.resource_metrics]
        collected = MetricsData(resources)
        super()._receive_metrics(collected, timeout_millis, **options)  # type: ignore[safe-super]

    def _with_histograms(self, resource: ResourceMetrics) -> ResourceMetrics:
        own = self._histograms
        scopes = [
            replace(scope, metrics=[*scope.metrics, *own.collect(self._reader)])
            if scope.scope == own.scope
            else scope
            for scope in resource.scope_metrics
        ]
        return replace(resource, scope_metrics=scopes)


class _Histogram:
    """Thread-safe histogram. A collection is a consistent snapshot."""

    def __init__(
        self,
        name: str,
        description: str,
        bounds: tuple[float, ...],
        temporalities: Sequence[AggregationTemporality],
    ) -> None:
        self._name, self._description, self._bounds = name, description, bounds
        self._lock = threading.Lock()
        self._streams = [_Stream(temporality) for temporality in temporalities]

    def record(self, amount: float, attributes: Mapping[str, str] = _NO_ATTRIBUTES) -> None:
        if not 0.0 <= amount < math.inf:
            _log.warning("%s of %s: no time; not recorded", amount, self._name)
            return
        key = frozenset(attributes.items())
        bucket = bisect_left(self._bounds, amount)
        with self._lock:
            for stream in self._streams:
                records = stream.by_attributes.get(key)
                if records is None:
                    since_ns = stream.since_ns or time.time_ns()
                    records = _Records(dict(attributes), since_ns, [0] * (len(self._bounds) + 1))
                    stream.by_attributes[key] = records
                records.counts[bucket] += 1
                records.sum += amount
                records.min = min(records.min, amount)
                records.max = max(records.max, amount)

    def collect(self, reader: int, now_ns: int) -> Metric | None:
        stream = self._streams[reader]
        with self._lock:
            points = [one.point(self._bounds, now_ns) for one in stream.by_attributes.values()]
            if stream.temporality is AggregationTemporality.DELTA:
                stream.by_attributes, stream.since_ns = {}, now_ns
        if not points:
            return None
        data = HistogramData(points, stream.temporality)
        return Metric(self._name, self._description, _UNIT, data)


@dataclass(slots=True, eq=False)
class _Records:
    """Records of one set of attributes since a time, in nanoseconds since the epoch."""

    attributes: Mapping[str, str]
    since_ns: int
    counts: list[int]
    """Records by bucket."""
    sum: float = 0.0
    min: float = math.inf
    max: float = -math.inf

    def point(self, bounds: tuple[float, ...], now_ns: int) -> HistogramDataPoint:
        return HistogramDataPoint(
            attributes=self.attributes,
            start_time_unix_nano=self.since_ns,
            time_unix_nano=now_ns,
            count=sum(self.counts),
            sum=self.sum,
            bucket_counts=tuple(self.counts),
            explicit_bounds=bounds,
            min=self.min,
            max=self.max,
        )


@dataclass(slots=True, eq=False)
class _Stream:
    """A histogram's state for one reader. since_ns: last collection, for delta temporality; 0
    before it."""

    temporality: AggregationTemporality
    since_ns: int = 0
    by_attributes: dict[_Key, _Records] = field(default_factory=dict)


class Counts:
    """A counter collected on demand, written by one thread. Adding updates a dict entry;
    OpenTelemetry's counter takes some 7 us, seven times per request.

    label: attribute that separates its values; empty for none.
    known: label values reported as 0 before their first count; without a label, its only value is.
    """

    def __init__(
        self,
        meter: Meter,
        name: str,
        description: str,
        label: str = "",
        *known: str,
        unit: str = "",
    ) -> None:
        self._label = label
        self._counts: dict[str, int] = dict.fromkeys(known if label else ("",), 0)
        meter.create_observable_counter(name, [self._observe], unit, description)

    def add(self, number: int, value: str = "") -> None:
        """Add to the count. value: of the label."""
        self._counts[value] = self._counts.get(value, 0) + number

    def _observe(self, options: CallbackOptions) -> Iterable[Observation]:  # noqa: ARG002
        counts = list(self._counts.items())  # a copy, because another thread reads it
        label = self._label
        return [Observation(number, {label: value} if label else {}) for value, number in counts]


def observe_build(meter: Meter, version: str) -> None:
    """Register a gauge with the build's version, protocol and Python as attributes."""
    attributes = {
        "baton.version": version,
        "baton.protocol_version": str(PROTOCOL_VERSION),
        "python.version": platform.python_version(),
    }

    _observe(meter, "baton.build.info", "The build; always 1.", attributes)


def observe_numerics(meter: Meter, numerics: NumericsClass) -> None:
    """Register gauges of a worker's numerics class, and of the fallback to torch operations without
    native CPU kernels."""
    attributes = {
        "baton.numerics.device": numerics.device,
        "baton.numerics.level": numerics.level,
        "baton.numerics.dtype": numerics.dtype,
        "baton.numerics.kernels": numerics.kernels,
    }
    _observe(meter, "baton.numerics.info", "The numerics class; always 1.", attributes)
    text = "1 if there are no native CPU kernels and torch's operations run, else 0."
    _observe(meter, "baton.kernels.fallback", text, {}, int(numerics.is_fallback))


def _observe(
    meter: Meter, name: str, text: str, attributes: Mapping[str, str], value: int = 1
) -> None:
    def constant(options: CallbackOptions) -> Iterable[Observation]:  # noqa: ARG001
        return [Observation(value, attributes)]

    meter.create_observable_gauge(name, [constant], description=text)

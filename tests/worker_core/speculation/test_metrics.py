"""What speculation did is in the metrics, as it is in the events."""

from __future__ import annotations

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.trace import NoOpTracer

from baton.events import Tokens
from baton.telemetry import Telemetry
from baton.telemetry.metrics import SdkHistograms
from baton.types import Sample
from worker_core.commands import StreamEvent
from worker_core.recorder import WorkerRecorder


def test_drafts_are_counted() -> None:
    reader = InMemoryMetricReader()
    meters = MeterProvider([reader], shutdown_on_exit=False)
    meter = meters.get_meter("test")
    telemetry = Telemetry(NoOpTracer(), meter, SdkHistograms(meter), False, True, lambda: None)
    recorder = WorkerRecorder(telemetry, lambda: 0.0)
    told = [
        Tokens(0, (Sample(1),)),
        Tokens(1, (Sample(1), Sample(2), Sample(3)), num_draft_tokens=4, num_accepted_tokens=2),
        Tokens(4, (Sample(1),), num_draft_tokens=3),
    ]
    recorder.on_step([StreamEvent(0, 1, tokens) for tokens in told])
    data = reader.get_metrics_data()
    assert data is not None
    totals = {
        metric.name: sum(point.value for point in metric.data.data_points)  # type: ignore[union-attr, misc]
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name.startswith("baton.d")
    }
    assert {name: total for name, total in totals.items() if total} == {
        "baton.decode.tokens": 5,
        "baton.drafts": 2,
        "baton.draft.tokens": 7,
        "baton.draft.accepted.tokens": 2,
    }

"""Metrics of planners."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from gateway.routing.gauges import observe_planner


def test_each_model_has_its_number_of_workers_while_one_is_said() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    planners: Any = {"one": SimpleNamespace(num_workers=3), "two": SimpleNamespace(num_workers=1)}
    observe_planner(provider.get_meter("test"), planners)

    def numbers() -> dict[str, int]:
        data: Any = reader.get_metrics_data()
        return {
            point.attributes["gen_ai.request.model"]: point.value
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
            for point in metric.data.data_points
            if metric.name == "baton.planner.workers.wanted"
        }

    assert numbers() == {"one": 3, "two": 1}
    planners["one"].num_workers = None
    assert numbers() == {"two": 1}
    provider.shutdown()

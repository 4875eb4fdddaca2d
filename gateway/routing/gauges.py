"""Metrics of the fleet, read on collection, and the list of worker targets for Prometheus HTTP
service discovery.

The gateway has the addresses of the registry and of its options, so Prometheus needs no list of its
own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from baton.telemetry import names
from gateway.routing.dispatcher import Dispatcher
from gateway.routing.fleet import Fleet, Worker
from gateway.routing.planner.steering import Steering


def observe_gateway(
    meter: Meter, fleets: Sequence[Fleet], dispatchers: Sequence[Dispatcher]
) -> None:
    """Register gauges of queues and workers, summed over all models. They are read in another
    thread, from snapshots."""

    def queue_length(options: CallbackOptions) -> Iterable[Observation]:  # noqa: ARG001
        return [Observation(sum(each.num_waiting for each in dispatchers))]

    def workers(options: CallbackOptions) -> Iterable[Observation]:  # noqa: ARG001
        counts = Counter((w.tier.name.lower(), w.state.value) for w in _workers(fleets))
        return [
            Observation(count, {names.WORKER_TIER: tier, names.STATE: state})
            for (tier, state), count in counts.items()
        ]

    def classes(options: CallbackOptions) -> Iterable[Observation]:  # noqa: ARG001
        return [Observation(max(len(fleet.numerics.classes) for fleet in fleets))]

    meter.create_observable_gauge(
        "baton.gateway.numerics.classes",
        [classes],
        description="Numerics classes of the workers of one model; "
        "above 1 tokens may differ between workers.",
    )
    meter.create_observable_gauge(
        "baton.gateway.queue.length", [queue_length], description="Requests that wait for workers."
    )
    meter.create_observable_gauge(
        "baton.gateway.workers", [workers], description="Workers as this gateway sees them."
    )


def observe_planner(meter: Meter, planners: Mapping[str, Steering]) -> None:
    """Register the gauge of the number of workers that planners want, by model. A gateway that does
    not lead has none, so that a dead leader's number is not counted beside the next one's."""

    def wanted(options: CallbackOptions) -> Iterable[Observation]:  # noqa: ARG001
        return [
            Observation(number, {names.REQUEST_MODEL: model})
            for model, each in planners.items()
            if (number := each.num_workers) is not None
        ]

    meter.create_observable_gauge(
        "baton.planner.workers.wanted",
        [wanted],
        description="Workers that the planner wants of a model; of the gateway that leads, with "
        "--max-workers.",
    )


def _workers(fleets: Sequence[Fleet]) -> list[Worker]:
    return [worker for fleet in fleets for worker in list(fleet.workers.values())]


#: Path on the gateway's metrics port.
DISCOVERY_PATH = "/sd"


class TargetGroup(TypedDict):
    """One entry of Prometheus HTTP service discovery: metrics addresses and their labels for
    relabelling."""

    targets: list[str]
    labels: dict[str, str]


def scrape_targets(fleets: Sequence[Fleet]) -> Sequence[TargetGroup]:
    """Return one group per worker with a metrics port that was reached once, ordered by address.

    Unreachable workers are included, because a failed scrape is what alerts are based on. Runs in
    another thread than the fleet's, on a snapshot.
    """
    groups: list[TargetGroup] = []
    for worker in sorted(_workers(fleets), key=lambda worker: worker.address):
        info = worker.info
        if info is None or not info.metrics_port:
            continue
        host = worker.address.rpartition(":")[0]
        labels = {
            "__meta_baton_worker_id": info.identity.worker_id,
            "__meta_baton_tier": info.tier.name.lower(),
            "__meta_baton_model": info.model,
        }
        groups.append({"targets": [f"{host}:{info.metrics_port}"], "labels": labels})
    return groups

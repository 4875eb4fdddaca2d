"""What is shown of the fleet: the gateway's state as metrics, read when somebody asks, and where
Prometheus finds the workers, in the form of its HTTP service discovery.

A gateway knows whom a registry lists and whom it was given by name, so that nobody lists workers
for Prometheus anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypedDict

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from baton.telemetry import names
from gateway.routing.dispatcher import Dispatcher
from gateway.routing.fleet import Fleet, Worker


def observe_gateway(
    meter: Meter, fleets: Sequence[Fleet], dispatchers: Sequence[Dispatcher]
) -> None:
    """Have the queues and the workers observed, of all models together. They are read in another
    thread, one snapshot at a time."""

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


def _workers(fleets: Sequence[Fleet]) -> list[Worker]:
    return [worker for fleet in fleets for worker in list(fleet.workers.values())]


#: On the gateway's metrics port.
DISCOVERY_PATH = "/sd"


class TargetGroup(TypedDict):
    """What Prometheus reads: addresses of metrics, and what is known of all of them, for its
    relabelling."""

    targets: list[str]
    labels: dict[str, str]


def scrape_targets(fleets: Sequence[Fleet]) -> Sequence[TargetGroup]:
    """A group for each worker that was reached once and has a metrics port, in order of addresses.

    One that is unreachable now is among them: that it cannot be scraped is what an alert is about.
    Read in another thread than the fleet's, one snapshot at a time.
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

"""The gateway's state as metrics, read when somebody asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from baton.telemetry import names
from gateway.routing.dispatcher import Dispatcher
from gateway.routing.fleet import Fleet


def observe_gateway(meter: Meter, fleet: Fleet, dispatcher: Dispatcher) -> None:
    """Have the queue and the workers observed. They are read in another thread, one snapshot at a
    time."""

    def queue_length(options: CallbackOptions) -> Iterable[Observation]:  # noqa: ARG001
        return [Observation(dispatcher.num_waiting)]

    def workers(options: CallbackOptions) -> Iterable[Observation]:  # noqa: ARG001
        counts = Counter((w.tier.name.lower(), w.state.value) for w in list(fleet.workers.values()))
        return [
            Observation(count, {names.WORKER_TIER: tier, names.STATE: state})
            for (tier, state), count in counts.items()
        ]

    def classes(options: CallbackOptions) -> Iterable[Observation]:  # noqa: ARG001
        return [Observation(len(fleet.numerics.classes))]

    meter.create_observable_gauge(
        "baton.gateway.numerics.classes",
        [classes],
        description="Numerics classes of the workers here; "
        "above 1 tokens may differ between workers.",
    )
    meter.create_observable_gauge(
        "baton.gateway.queue.length", [queue_length], description="Requests that wait for workers."
    )
    meter.create_observable_gauge(
        "baton.gateway.workers", [workers], description="Workers as this gateway sees them."
    )

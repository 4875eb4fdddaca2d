"""Where Prometheus finds the workers: this gateway's fleet, in the form of its HTTP service
discovery.

A gateway knows whom a registry lists and whom it was given by name, so that nobody lists workers
for Prometheus anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from gateway.routing.fleet import Fleet

#: On the gateway's metrics port.
DISCOVERY_PATH = "/sd"


class TargetGroup(TypedDict):
    """What Prometheus reads: addresses of metrics, and what is known of all of them, for its
    relabelling."""

    targets: list[str]
    labels: dict[str, str]


def scrape_targets(fleet: Fleet) -> Sequence[TargetGroup]:
    """A group for each worker that was reached once and has a metrics port, in order of addresses.

    One that is unreachable now is among them: that it cannot be scraped is what an alert is about.
    Read in another thread than the fleet's, one snapshot at a time.
    """
    groups: list[TargetGroup] = []
    for worker in sorted(fleet.workers.values(), key=lambda worker: worker.address):
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

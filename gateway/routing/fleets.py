"""One fleet per model, filled from one list of addresses. The registry lists addresses without
models; each worker reports its model when it is reached."""

from __future__ import annotations

from collections.abc import Mapping

from baton.errors import PeerMismatch
from baton.types import Tier, WorkerInfo, WorkerLoad
from gateway.links.worker_link import WorkerLink
from gateway.routing.fleet import Fleet, Worker, WorkerState


class Fleets:
    """Implements gateway.routing.workers.Membership. A worker is in `unsorted` until it is reached,
    then in the fleet of the model it reported last."""

    def __init__(self, by_model: Mapping[str, Fleet]) -> None:
        """by_model: fleets by the model name that workers report."""
        self._by_model = by_model
        self.unsorted = Fleet()
        self._all = (self.unsorted, *by_model.values())

    @property
    def workers(self) -> Mapping[str, Worker]:
        """All workers by address, as a snapshot."""
        return {address: each for fleet in self._all for address, each in fleet.workers.items()}

    def add(self, address: str, tier: Tier) -> Worker:
        """See Fleet."""
        if any(address in fleet.workers for fleet in self._all):
            raise ValueError(f"{address} is in a fleet already")
        return self.unsorted.add(address, tier)

    def remove(self, address: str) -> None:
        """See Fleet."""
        self._fleet_of(address).remove(address)

    def join(self, address: str, info: WorkerInfo, link: WorkerLink) -> None:
        """See Fleet. Also raises PeerMismatch for a worker of a model that is not served."""
        current, fleet = self._fleet_of(address), self._by_model.get(info.model)
        if fleet is None:
            peer = f"{info.identity.worker_id} at {address}"
            error = PeerMismatch.of(peer, "model", " or ".join(self._by_model), info.model)
            current.leave(address, WorkerState.REFUSED, error.message)
            raise error
        if current is not fleet:
            tier = current.workers[address].listed_tier
            current.remove(address)
            fleet.add(address, tier)
        fleet.join(address, info, link)

    def report(self, address: str, load: WorkerLoad) -> None:
        """See Fleet."""
        self._fleet_of(address).report(address, load)

    def leave(self, address: str, state: WorkerState, reason: str) -> None:
        """See Fleet."""
        self._fleet_of(address).leave(address, state, reason)

    def _fleet_of(self, address: str) -> Fleet:
        return next(fleet for fleet in self._all if address in fleet.workers)

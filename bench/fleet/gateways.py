"""A gateway of a simulated fleet, and the registry that several of them share.

Fleet, dispatcher with admission and router, planner, and the notes between gateways are the real
ones; the registry is a double of Redis that needs no network.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from math import inf

from baton.registry.board import Board
from baton.registry.lease import Lease, SoleLease
from baton.types import Slo, Tier, WorkerInfo
from gateway.routing.dispatcher import Dispatcher, Placing
from gateway.routing.fleet import Fleet, WorkerState
from gateway.routing.planner.steering import SetRole, Steering
from gateway.routing.rivals import share_counters
from tests.support.sim_load import inline
from tests.support.stub_link import StubLink

#: Seconds that a lease and a note last, as in Redis.
_LEASE_S, _NOTE_S = 10.0, 3.0


class Registry:
    """The lease and the notes of several gateways. is_away: nobody can reach it."""

    def __init__(self) -> None:
        self.is_away = False
        self.holder = ""
        """The gateway that took the lease last."""
        self.held_until_s = -inf
        self.term = self.number = 0
        self.notes: dict[str, tuple[float, str]] = {}
        """(time, text) by gateway."""

    def lease_of(self, gateway: str) -> Lease:
        return _SharedLease(self, gateway)

    def board_of(self, gateway: str) -> Board:
        return _SharedBoard(self, gateway)


class _SharedLease:
    """Implements Lease."""

    lasts_s = _LEASE_S

    def __init__(self, registry: Registry, gateway: str) -> None:
        self._registry, self._gateway = registry, gateway

    async def hold(self) -> int | None:
        """See Lease."""
        registry, now_s = self._registry, asyncio.get_running_loop().time()
        is_free = now_s >= registry.held_until_s
        if registry.is_away or not (is_free or registry.holder == self._gateway):
            return None
        if is_free:
            registry.holder = self._gateway
            registry.term += 1
        registry.held_until_s = now_s + _LEASE_S
        return registry.term

    async def record(self, number: int | None) -> int | None:
        """See Lease."""
        registry = self._registry
        if registry.is_away or registry.holder != self._gateway:
            return None
        registry.number = registry.number if number is None else number
        return registry.number

    async def close(self) -> None:
        """See Lease."""


class _SharedBoard:
    """Implements Board."""

    def __init__(self, registry: Registry, gateway: str) -> None:
        self._registry, self._gateway = registry, gateway

    async def exchange(self, note: str) -> Mapping[str, str]:
        """See Board."""
        if self._registry.is_away:
            return {}
        notes, now_s = self._registry.notes, asyncio.get_running_loop().time()
        notes[self._gateway] = now_s, note
        return {
            gateway: text
            for gateway, (at_s, text) in notes.items()
            if gateway != self._gateway and now_s < at_s + _NOTE_S
        }

    async def close(self) -> None:
        """See Board."""


class Gateway:
    """One gateway; it works until `close`."""

    def __init__(
        self,
        name: str,
        tiers: Mapping[str, Tier],
        slo: Slo,
        placing: Placing,
        set_role: SetRole,
        *,
        key: bytes,
        max_queue_size: int,
        is_planned: bool,
        registry: Registry | None,
    ) -> None:
        """tiers: in which workers start, by address. registry: None if it is alone."""
        self.name = name
        self.fleet = Fleet(
            [address for address, tier in tiers.items() if tier is Tier.PREFILL],
            [address for address, tier in tiers.items() if tier is Tier.DECODE],
            slo=slo,
        )
        self.dispatcher = Dispatcher(
            self.fleet, max_queue_size=max_queue_size, key=key, placing=placing
        )
        lease = registry.lease_of(name) if registry else SoleLease()
        self._steering = Steering(self.fleet, self.dispatcher.log, lease, set_role, inline)
        jobs: list[Coroutine[object, object, None]] = [self.dispatcher.run()]
        if is_planned:
            jobs.append(self._steering.run())
        if registry:
            shares, take = self.dispatcher.shares, self.dispatcher.take_shares
            jobs.append(share_counters(shares, take, registry.board_of(name)))
        self._tasks = [asyncio.create_task(job) for job in jobs]

    @property
    def num_changes(self) -> int:
        """Roles that its planner changed."""
        return self._steering.num_changes

    def join(self, name: str, info: WorkerInfo) -> None:
        """A worker has come; its report follows."""
        self.fleet.join(name, info, StubLink())

    def leave(self, names: Sequence[str]) -> None:
        """Workers are lost."""
        for name in names:
            self.fleet.leave(name, WorkerState.UNREACHABLE, "lost")

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

"""Applies the planner's roles to the workers of one model.

Each period, the gateway that has the lease orders what differs from the plan, as workers report
it. So an order that was lost is given again, and another leader goes on where this one stopped.
What runs on a worker runs on: sequences on a worker that prefills from now on are migrated
(migrator.py). Without the lease, or without the registry that gives it, roles stay as they are.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from baton.errors import BatonError
from baton.registry.lease import Lease
from baton.types import Role, Tier
from gateway.routing.fleet import Fleet, Worker
from gateway.routing.planner.planner import LoadLog, Planner
from gateway.routing.planner.replay import Demand
from gateway.routing.planner.shapes import WorkerFacts

_log = logging.getLogger(__name__)

#: Seconds between two decisions.
PERIOD_S = 4.0
#: The same while workers do not have the roles of the plan yet; nothing is replayed meanwhile.
MOVING_S = 1.0
#: One of so many workers changes its role in a period, at least one.
_MOVE_ONE_OF = 4


Decide = Callable[[float, Sequence[WorkerFacts], Sequence[Demand]], Mapping[str, Role]]


class Aside(Protocol):
    """Runs a call elsewhere, as asyncio.to_thread does."""

    async def __call__(
        self,
        decide: Decide,
        now_s: float,
        workers: Sequence[WorkerFacts],
        demands: Sequence[Demand],
        /,
    ) -> Mapping[str, Role]: ...


class SetRole(Protocol):
    """Orders the worker at an address to take a role, and returns once it has. term: of the lease.
    Raises BatonError."""

    async def __call__(self, address: str, role: Role, term: int, /) -> None: ...


class Steering:
    """Owns the planner of one model."""

    def __init__(
        self,
        fleet: Fleet,
        log: LoadLog,
        lease: Lease,
        set_role: SetRole,
        aside: Aside = asyncio.to_thread,
    ) -> None:
        """aside: runs a decision, which takes up to some tenths of a second, beside the event
        loop."""
        self._aside = aside
        self._fleet = fleet
        self._load_log = log
        self._lease = lease
        self._set_role = set_role
        self._planner = Planner(fleet.slo)
        self._is_moving = False
        self._num_arrivals = 0
        """Requests that the last decision was made from."""
        self.num_changes = 0
        """Roles that were changed."""

    async def run(self) -> None:
        """Plan until cancelled."""
        try:
            while True:
                await asyncio.sleep(min(PERIOD_S, MOVING_S) if self._is_moving else PERIOD_S)
                await self._plan()
        finally:
            await self._lease.close()

    async def _plan(self) -> None:
        workers = [*self._fleet.ready(Tier.PREFILL), *self._fleet.ready(Tier.DECODE)]
        self._planner.observe([(w.load.num_threads, w.load.costs) for w in workers])
        term = await self._lease.hold()
        if term is None:
            return
        demands: Sequence[Demand] = ()
        if self._load_log.num_arrivals != self._num_arrivals:
            demands = self._load_log.demands(self._share(workers))
            self._num_arrivals = self._load_log.num_arrivals
        now_s = asyncio.get_running_loop().time()
        facts = [*map(_facts_of, workers)]
        try:
            roles = await self._aside(self._planner.decide, now_s, facts, demands)
        except (ArithmeticError, ValueError) as error:  # of numbers that workers report
            _log.warning("no plan for now: %r", error)
            return
        left: set[Worker] = set()
        for worker, role in self._changes(workers, roles):
            # Orders to workers that do not answer may take longer than the lease lasts.
            if await self._lease.hold() != term:
                return
            if role.tier is Tier.PREFILL and worker.tier is Tier.DECODE:
                left.add(worker)  # also if its answer is lost; its report may come later
                if left.issuperset(self._fleet.ready(Tier.DECODE)):
                    return
            await self._change(worker, role, term)

    def _share(self, workers: list[Worker]) -> float:
        """Share of the fleet's sequences that this gateway has placed."""
        num_own = sum(worker.num_homed for worker in workers)
        num_all = sum(worker.load.num_running + worker.load.num_waiting for worker in workers)
        return min(1.0, num_own / num_all) if num_own and num_all else 1.0

    def _changes(
        self, workers: list[Worker], roles: Mapping[str, Role]
    ) -> Iterator[tuple[Worker, Role]]:
        """What to order now: first those that come to the decode tier, so that others may leave
        it."""
        differing = [
            (worker, role)
            for worker in workers
            if (role := roles.get(worker.address)) and _role_of(worker) != role
        ]
        self._is_moving = bool(differing)
        differing.sort(key=lambda change: change[1].tier is Tier.PREFILL)
        yield from differing[: max(1, len(workers) // _MOVE_ONE_OF)]

    async def _change(self, worker: Worker, role: Role, term: int) -> None:
        try:
            await self._set_role(worker.address, role, term)
        except BatonError as error:
            _log.warning("worker %s did not take another role: %s", worker.name, error.message)
            return
        self.num_changes += 1
        _log.info("worker %s: %s", worker.name, role)


def _facts_of(worker: Worker) -> WorkerFacts:
    return WorkerFacts(
        worker.address,
        worker.address.rpartition(":")[0],
        worker.listed_tier,
        _role_of(worker),
        worker.info.num_threads if worker.info else 0,
    )


def _role_of(worker: Worker) -> Role:
    """The role that it reports; num_threads: 0 if they are those of the start."""
    load, started = worker.load, worker.info.num_threads if worker.info else 0
    num_threads = load.num_threads if load.num_threads != started else 0
    return Role(worker.tier, load.is_colocated, num_threads)

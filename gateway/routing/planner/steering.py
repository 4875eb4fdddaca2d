"""Applies the planner's roles to the workers of one model, and says how many there should be.

Each period, the gateway that has the lease orders what differs from the plan, as workers report
it. So an order that was lost is given again, and another leader goes on where this one stopped.
What runs on a worker runs on: sequences on a worker that prefills from now on are migrated
(migrator.py). Without the lease, or without the registry that gives it, roles stay as they are, and
no number is said.

The number of workers is recorded beside the lease before it is published, so that the next leader
begins with it, and published for as long as the lease is held.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from typing import Protocol

from baton.errors import BatonError
from baton.registry.lease import Lease
from baton.types import Role, Tier
from gateway.routing.fleet import Fleet, Worker
from gateway.routing.planner.planner import Decision, LoadLog, Planner
from gateway.routing.planner.replay import Load
from gateway.routing.planner.shapes import WorkerFacts
from gateway.routing.planner.size import SPARE_S, Bounds

_log = logging.getLogger(__name__)

#: Seconds between two decisions.
PERIOD_S = 4.0
#: The same while workers do not have the roles of the plan yet; nothing is replayed meanwhile.
MOVING_S = 1.0
#: One of so many workers changes its role in a period, at least one.
_MOVE_ONE_OF = 4


Decide = Callable[[float, Sequence[WorkerFacts], Load | None], Decision]


class Aside(Protocol):
    """Runs a call elsewhere, as asyncio.to_thread does."""

    async def __call__(
        self,
        decide: Decide,
        now_s: float,
        workers: Sequence[WorkerFacts],
        load: Load | None,
        /,
    ) -> Decision: ...


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
        *,
        bounds: Bounds | None = None,
        on_number: Callable[[int], None] = lambda _number: None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """aside: runs a decision, which takes up to some tenths of a second, beside the event loop.
        bounds: of the number of workers; None: it is not decided.
        on_number: receives each number of workers that is published.
        clock: monotonic seconds, read in other threads, too; by default the event loop's."""
        self._aside = aside
        self._fleet = fleet
        self._load_log = log
        self._lease = lease
        self._set_role = set_role
        self._on_number = on_number
        self._planner = Planner(fleet.slo, bounds)
        self._is_moving = self._is_waiting_told = False
        self._num_arrivals = self._num_workers = 0
        """Requests and workers that the last decision was made from."""
        self._asked_s = -inf
        """When requests were last seen to have come."""
        self._term: int | None = None
        self._published: tuple[int, float] | None = None
        """The number of workers, and when the lease under which it was said ends."""
        self._has_decode = False
        self._is_decode_lost = asyncio.Event()
        self.num_changes = 0
        """Roles that were changed."""
        self._clock = clock or asyncio.get_running_loop().time
        fleet.listen(self._on_change)

    @property
    def num_workers(self) -> int | None:
        """The number of workers that is published now; None without, and once the lease is over.
        May be read in another thread."""
        published = self._published
        return published[0] if published and self._clock() < published[1] else None

    def _on_change(self) -> None:
        had, self._has_decode = self._has_decode, self._fleet.has_ready(Tier.DECODE)
        if had and not self._has_decode:
            self._is_decode_lost.set()

    async def run(self) -> None:
        """Plan until cancelled; at once where the last worker that decodes is lost."""
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    period_s = min(PERIOD_S, MOVING_S) if self._is_moving else PERIOD_S
                    async with asyncio.timeout(period_s):
                        await self._is_decode_lost.wait()
                self._is_decode_lost.clear()
                await self._plan()
        finally:
            self._published = None
            await self._lease.close()

    async def _plan(self) -> None:
        workers = [*self._fleet.ready(Tier.PREFILL), *self._fleet.ready(Tier.DECODE)]
        self._planner.observe([(w.load.num_threads, w.load.costs) for w in workers])
        now_s = self._clock()
        term = await self._hold()
        if term is None:
            return
        load = None
        if self._has_news(len(workers)):
            loop_s = asyncio.get_running_loop().time()  # requests are dated by this clock
            load = self._load_log.load(loop_s, self._share(workers))
            if load and not self._planner.has_costs and not self._is_waiting_told:
                self._is_waiting_told = True
                _log.info("roles stay until workers have computed and decoded more steps")
        facts = [*map(_facts_of, workers)]
        try:
            decision = await self._aside(self._planner.decide, now_s, facts, load)
        except (ArithmeticError, ValueError) as error:  # of numbers that workers report
            _log.warning("no plan for now: %r", error)
            return
        if await self._publish(decision.num_workers, now_s):
            await self._order(workers, decision, term)

    async def _hold(self) -> int | None:
        """The term of the lease, if this gateway has it; a new one begins with the number that the
        leader before recorded."""
        term = await self._lease.hold()
        if term is None:
            self._planner.pause()
        elif term != self._term:
            recorded = await self._lease.record(None)
            if recorded is None:
                return None
            self._planner.lead(recorded or None)
            self._term = term
        return term

    def _has_news(self, num_workers: int) -> bool:
        """Whether requests came since the last decision, or shortly before workers came or went."""
        before = self._num_arrivals, self._num_workers
        self._num_arrivals, self._num_workers = self._load_log.num_arrivals, num_workers
        if self._num_arrivals != before[0]:
            self._asked_s = self._clock()
            return True
        return num_workers != before[1] and self._clock() - self._asked_s < SPARE_S

    async def _publish(self, number: int | None, held_s: float) -> bool:
        """Record the number of workers, then publish it. held_s: when the lease was renewed. Return
        False if another gateway may lead by now."""
        if number is None:
            return True
        if await self._lease.record(number) != number:
            return False
        before = self.num_workers
        self._published = (number, held_s + self._lease.lasts_s)
        if number != before:
            self._on_number(number)
        return True

    async def _order(self, workers: list[Worker], decision: Decision, term: int) -> None:
        """Give workers their roles. The decode tier keeps a worker, whichever ones leave because
        fewer are wanted."""
        number = len(workers) if decision.num_workers is None else decision.num_workers
        num_leaving = max(0, len(workers) - number)
        left: set[Worker] = set()
        for worker, role in self._changes(workers, decision.roles):
            # Orders to workers that do not answer may take longer than the lease lasts.
            if await self._lease.hold() != term:
                return
            if role.tier is Tier.PREFILL and worker.tier is Tier.DECODE:
                left.add(worker)  # also if its answer is lost; its report may come later
                if len(set(self._fleet.ready(Tier.DECODE)) - left) <= num_leaving:
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
        worker.num_sequences,
    )


def _role_of(worker: Worker) -> Role:
    """The role that it reports; num_threads: 0 if they are those of the start."""
    load, started = worker.load, worker.info.num_threads if worker.info else 0
    num_threads = load.num_threads if load.num_threads != started else 0
    return Role(worker.tier, load.is_colocated, num_threads)

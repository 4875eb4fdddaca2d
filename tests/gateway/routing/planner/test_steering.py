"""Orders are given for as long as the lease is held, and only then."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from baton.errors import WorkerLost
from baton.types import Role, Tier
from gateway.routing.planner import steering
from gateway.routing.planner.planner import LoadLog
from gateway.routing.planner.replay import Demand
from gateway.routing.planner.shapes import WorkerFacts
from gateway.routing.planner.steering import Decide, Steering
from tests.gateway.routing.test_router_at_scale import fleet_of


class Registry:
    """Implements Lease: gives these terms, then none, and ends the test."""

    def __init__(self, *terms: int | None) -> None:
        self.terms = list(terms)
        self.is_over = asyncio.Event()

    async def hold(self) -> int | None:
        if self.terms:
            return self.terms.pop(0)
        self.is_over.set()
        return None

    async def close(self) -> None:
        pass


async def all_colocated(
    decide: Decide,  # noqa: ARG001
    now_s: float,  # noqa: ARG001
    workers: Sequence[WorkerFacts],
    demands: Sequence[Demand],  # noqa: ARG001
) -> Mapping[str, Role]:
    return {worker.address: Role(Tier.DECODE, is_colocated=True) for worker in workers}


@pytest.mark.parametrize(
    ("terms", "num_orders"),
    [
        pytest.param((7,), 0, id="lost while it decided"),
        pytest.param((7, 7), 1, id="lost between two orders"),
        pytest.param((7, 7, 8), 1, id="another's term between"),
        pytest.param((7, 7, 7), 2, id="held"),
    ],
)
async def test_orders_end_with_the_lease(
    terms: Sequence[int], num_orders: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of eight workers, two are given another role in a period, though the first does not
    answer."""
    monkeypatch.setattr(steering, "PERIOD_S", 0.0)
    orders: list[int] = []

    async def set_role(address: str, role: Role, term: int) -> None:  # noqa: ARG001
        orders.append(term)
        raise WorkerLost(f"{address} does not answer")

    lease = Registry(*terms)
    planning = Steering(fleet_of(4, 4), LoadLog(), lease, set_role, all_colocated)
    task = asyncio.create_task(planning.run())
    await asyncio.wait_for(lease.is_over.wait(), 10.0)
    task.cancel()
    assert orders == [7] * num_orders


async def test_the_decode_tier_is_not_emptied_before_reports_say_who_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steering, "PERIOD_S", 0.0)
    fleet, orders = fleet_of(10, 2), []

    async def swapped(*_: object) -> Mapping[str, Role]:
        return {
            "p0:1": Role(Tier.DECODE),
            "d0:1": Role(Tier.PREFILL),
            "d1:1": Role(Tier.PREFILL),
        }

    async def set_role(address: str, role: Role, term: int) -> None:  # noqa: ARG001
        orders.append(address)
        if role.tier is Tier.DECODE:
            raise WorkerLost(f"{address} does not answer")

    lease = Registry(7, 7, 7, 7)
    task = asyncio.create_task(Steering(fleet, LoadLog(), lease, set_role, swapped).run())
    await asyncio.wait_for(lease.is_over.wait(), 10.0)
    task.cancel()
    assert orders == ["p0:1", "d0:1"]


async def test_nothing_is_replayed_while_nothing_comes_and_bad_numbers_cost_one_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steering, "PERIOD_S", 0.0)
    log, seen = LoadLog(), []
    for number in range(10):
        log.on_arrival(f"r{number}", float(number), 10)
        log.on_ended(f"r{number}", 10)

    async def count(
        decide: Decide,  # noqa: ARG001
        now_s: float,  # noqa: ARG001
        workers: Sequence[WorkerFacts],  # noqa: ARG001
        demands: Sequence[Demand],
    ) -> Mapping[str, Role]:
        seen.append(len(demands))
        if len(seen) == 2:
            log.on_arrival("another", 10.0, 10)
            raise ZeroDivisionError
        return {}

    async def set_role(address: str, role: Role, term: int) -> None:
        raise AssertionError((address, role, term))

    lease = Registry(7, 7, 7, 7)
    task = asyncio.create_task(Steering(fleet_of(4, 4), log, lease, set_role, count).run())
    await asyncio.wait_for(lease.is_over.wait(), 10.0)
    task.cancel()
    assert seen == [10, 0, 11, 0]

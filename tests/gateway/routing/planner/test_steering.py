"""Orders are given for as long as the lease is held, and only then."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from baton.errors import WorkerLost
from baton.types import Role, Tier
from gateway.routing.fleet import WorkerState
from gateway.routing.planner import steering
from gateway.routing.planner.planner import Decision, LoadLog
from gateway.routing.planner.replay import Load
from gateway.routing.planner.shapes import WorkerFacts
from gateway.routing.planner.size import Bounds
from gateway.routing.planner.steering import Aside, Decide, Steering
from tests.gateway.routing.test_router_at_scale import fleet_of


class Registry:
    """Implements Lease: gives these terms, then none, and ends the test. number: that is recorded;
    None: the registry cannot be reached any more."""

    lasts_s = 10.0

    def __init__(self, *terms: int | None) -> None:
        self.terms = list(terms)
        self.number: int | None = 0
        self.is_over = asyncio.Event()

    async def hold(self) -> int | None:
        if self.terms:
            return self.terms.pop(0)
        self.is_over.set()
        return None

    async def record(self, number: int | None) -> int | None:
        self.number = self.number if number is None or self.number is None else number
        return self.number

    async def close(self) -> None:
        pass


async def all_colocated(
    decide: Decide,  # noqa: ARG001
    now_s: float,  # noqa: ARG001
    workers: Sequence[WorkerFacts],
    load: Load | None,  # noqa: ARG001
) -> Decision:
    role = Role(Tier.DECODE, is_colocated=True)
    return Decision({worker.address: role for worker in workers})


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

    async def swapped(*_: object) -> Decision:
        roles = {
            "p0:1": Role(Tier.DECODE),
            "d0:1": Role(Tier.PREFILL),
            "d1:1": Role(Tier.PREFILL),
        }
        return Decision(roles)

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
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(steering, "PERIOD_S", 0.0)
    log, seen = LoadLog(), []
    for number in range(10):
        log.on_arrival(f"r{number}", float(number), 10)
        log.on_ended(f"r{number}", 10)

    async def count(
        decide: Decide,  # noqa: ARG001
        now_s: float,  # noqa: ARG001
        workers: Sequence[WorkerFacts],  # noqa: ARG001
        load: Load | None,
    ) -> Decision:
        seen.append(len(load.latest) if load else 0)
        if len(seen) == 2:
            log.on_arrival("another", 10.0, 10)
            raise ZeroDivisionError
        return Decision({})

    async def set_role(address: str, role: Role, term: int) -> None:
        raise AssertionError((address, role, term))

    lease = Registry(7, 7, 7, 7)
    task = asyncio.create_task(Steering(fleet_of(4, 4), log, lease, set_role, count).run())
    await asyncio.wait_for(lease.is_over.wait(), 10.0)
    task.cancel()
    assert seen == [10, 0, 11, 0]
    assert caplog.text.count("roles stay until workers have computed") == 1


def numbered(*numbers: int | None) -> Aside:
    """Decides these numbers of workers, one a period."""
    left = list(numbers)

    async def decide(*_: object) -> Decision:
        return Decision({}, left.pop(0) if left else None)

    return decide


async def no_roles(address: str, role: Role, term: int) -> None:
    raise AssertionError((address, role, term))


async def published(lease: Registry, *numbers: int | None) -> tuple[list[int], Steering]:
    """What is published until the lease's terms are over."""
    said: list[int] = []
    planning = Steering(
        fleet_of(2, 2),
        LoadLog(),
        lease,
        no_roles,
        numbered(*numbers),
        bounds=Bounds(1, 8),
        on_number=said.append,
    )
    task = asyncio.create_task(planning.run())
    await asyncio.wait_for(lease.is_over.wait(), 10.0)
    task.cancel()
    return said, planning


async def test_a_number_is_recorded_before_it_is_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steering, "PERIOD_S", 0.0)
    lease = Registry(7, 7, 7, 7)
    said, planning = await published(lease, None, 5, 5, 6)
    assert said == [5, 6]
    assert lease.number == 6
    assert planning.num_workers == 6
    lease = Registry(7, 7)
    lease.record = away  # type: ignore[method-assign]
    said, planning = await published(lease, 5, 5)
    assert said == []
    assert planning.num_workers is None


async def away(number: int | None) -> int | None:
    """The lease is lost between a decision and its record."""
    return 0 if number is None else None


async def test_the_number_ends_with_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader that was suspended does not know yet that another one leads."""
    monkeypatch.setattr(steering, "PERIOD_S", 0.0)
    now_s = 0.0
    lease = Registry(7)
    planning = Steering(
        fleet_of(2, 2),
        LoadLog(),
        lease,
        no_roles,
        numbered(5),
        bounds=Bounds(1, 8),
        clock=lambda: now_s,
    )
    task = asyncio.create_task(planning.run())
    await asyncio.wait_for(lease.is_over.wait(), 10.0)
    assert planning.num_workers == 5
    now_s = lease.lasts_s
    assert planning.num_workers is None
    task.cancel()


async def test_the_next_leader_begins_with_the_number_of_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steering, "PERIOD_S", 0.0)
    lease, said = Registry(7, 7), []
    lease.number = 6

    async def inline(decide: Decide, *state: Any) -> Decision:
        return decide(*state)

    planning = Steering(
        fleet_of(1, 1),
        LoadLog(),
        lease,
        no_roles,
        inline,
        bounds=Bounds(1, 8),
        on_number=said.append,
    )
    task = asyncio.create_task(planning.run())
    await asyncio.wait_for(lease.is_over.wait(), 10.0)
    task.cancel()
    assert said == [6], "workers that start still are not sent away"


async def test_the_loss_of_the_last_worker_that_decodes_is_planned_for_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not after a period, which never ends here."""
    monkeypatch.setattr(steering, "PERIOD_S", 1e6)
    fleet, orders = fleet_of(2, 1), asyncio.Queue[str]()

    async def inline(decide: Decide, *state: Any) -> Decision:
        return decide(*state)

    async def set_role(address: str, role: Role, term: int) -> None:  # noqa: ARG001
        if role.tier is Tier.DECODE:
            orders.put_nowait(address)

    lease = Registry(*[7] * 9)
    task = asyncio.create_task(Steering(fleet, LoadLog(), lease, set_role, inline).run())
    await asyncio.sleep(0)
    fleet.changed()
    fleet.leave("d0:1", WorkerState.UNREACHABLE, "killed")
    assert await asyncio.wait_for(orders.get(), 10.0) in ("p0:1", "p1:1")
    task.cancel()

"""Whom the gateway keeps connected to, as lists and connections come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import WorkerLost
from baton.events import Failed
from baton.registry import Registration, StaticRegistry, WorkerAdded, WorkerRemoved
from baton.registry.interface import Change
from baton.types import KvSource, Tier
from gateway.routing.fleet import Fleet, WorkerState
from gateway.routing.workers import Roster
from tests.support.fake_workers import make_info
from tests.support.gateway_world import make_spec
from tests.support.grpc_workers import GrpcWorker, serving

DECODE = make_info("d", Tier.DECODE)


class Listing:
    """A registry with a list that the test changes."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Change] = asyncio.Queue()
        self.tell = self._queue.put_nowait

    async def changes(self) -> AsyncGenerator[Change, None]:
        while True:
            yield await self._queue.get()

    async def announce(self, current: Callable[[], Registration | None]) -> NoReturn:
        raise NotImplementedError


@asynccontextmanager
async def following(fleet: Fleet) -> AsyncIterator[Listing]:
    listing = Listing()
    task = asyncio.create_task(Roster(fleet).follow(listing))
    try:
        yield listing
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(fleet: Fleet, is_so: Callable[[], bool]) -> None:
    changed = asyncio.Event()
    fleet.listen(changed.set)
    while not is_so():
        changed.clear()
        await changed.wait()


async def test_a_worker_off_the_list_is_kept_while_its_connection_stands() -> None:
    fleet = Fleet()
    async with following(fleet) as listing, serving(GrpcWorker(DECODE)) as d:
        listing.tell(WorkerAdded(d.address, Tier.DECODE))
        await until(fleet, lambda: bool(fleet.ready(Tier.DECODE)))
        worker = fleet.workers[d.address]
        listing.tell(WorkerRemoved(d.address))
        listing.tell(WorkerAdded("nobody:1", Tier.PREFILL))  # taken after the other
        await until(fleet, lambda: "nobody:1" in fleet.workers)
        assert fleet.ready(Tier.DECODE) == (worker,)
        await d.stop()
        await until(fleet, lambda: d.address not in fleet.workers)
        assert not fleet.ready(Tier.DECODE)


async def test_a_worker_back_on_the_list_is_sought_again_when_it_is_lost() -> None:
    fleet = Fleet()
    async with following(fleet) as listing:
        async with serving(GrpcWorker(DECODE)) as d:
            address, port = d.address, d.port
            listing.tell(WorkerAdded(address, Tier.DECODE))
            await until(fleet, lambda: bool(fleet.ready(Tier.DECODE)))
            listing.tell(WorkerRemoved(address))
            listing.tell(WorkerAdded(address, Tier.DECODE))
        await until(fleet, lambda: fleet.workers[address].state is WorkerState.UNREACHABLE)
        async with serving(GrpcWorker(DECODE), port):
            await until(fleet, lambda: bool(fleet.ready(Tier.DECODE)))


async def test_an_address_that_comes_back_as_the_other_tier_is_taken_as_that() -> None:
    fleet = Fleet()
    async with following(fleet) as listing, serving(GrpcWorker(DECODE)) as d:
        listing.tell(
            WorkerAdded(d.address, Tier.PREFILL)
        )  # an old entry: refused by the worker's word
        await until(
            fleet,
            lambda: (
                d.address in fleet.workers and fleet.workers[d.address].state is WorkerState.REFUSED
            ),
        )
        listing.tell(WorkerRemoved(d.address))
        listing.tell(WorkerAdded(d.address, Tier.DECODE))
        await until(fleet, lambda: bool(fleet.ready(Tier.DECODE)))


async def test_sequences_of_a_worker_that_leaves_hear_of_it() -> None:
    fleet = Fleet()
    async with following(fleet) as listing, serving(GrpcWorker(DECODE, is_holding=True)) as d:
        listing.tell(WorkerAdded(d.address, Tier.DECODE))
        await until(fleet, lambda: bool(fleet.ready(Tier.DECODE)))
        events: asyncio.Queue[object] = asyncio.Queue()
        link = fleet.workers[d.address].link
        link.open(make_spec("a"), KvSource.LOCAL, [events.put_nowait])
        await events.get()
        listing.tell(WorkerRemoved(d.address))
        await d.stop()
        event = await events.get()
        assert isinstance(event, Failed)
        assert event.reason == WorkerLost.reason


async def test_the_static_list_is_followed_for_good() -> None:
    fleet = Fleet()
    async with serving(GrpcWorker(DECODE)) as d:
        task = asyncio.create_task(Roster(fleet).follow(StaticRegistry(["p:1"], [d.address])))
        await until(fleet, lambda: bool(fleet.ready(Tier.DECODE)))
        assert fleet.workers["p:1"].tier is Tier.PREFILL
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Fake:
    """Connections that stand or break as the test says."""

    def __init__(self) -> None:
        self.standing: set[str] = set()
        self.moved = asyncio.Condition()

    async def __call__(
        self, fleet: Fleet, address: str, /, *, is_wanted: Callable[[], bool]
    ) -> None:
        async with self.moved:
            await self.moved.wait_for(lambda: not is_wanted() and address not in self.standing)
        assert address in fleet.workers

    async def move(self) -> None:
        for _ in range(4):
            async with self.moved:
                self.moved.notify_all()
            await asyncio.sleep(0)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["a:1", "b:1"]),
        st.sampled_from([Tier.PREFILL, Tier.DECODE, "leave", "stand", "break"]),
    ),
    max_size=12,
)


@given(steps=STEPS)
def test_the_fleet_is_who_is_listed_or_connected(steps: list[tuple[str, Tier | str]]) -> None:
    async def run() -> None:
        fleet, fake, listing = Fleet(), Fake(), Listing()
        task = asyncio.create_task(Roster(fleet, connect=fake).follow(listing))
        listed: dict[str, Tier] = {}
        for address, step in steps:
            if isinstance(step, Tier):
                if address in listed:
                    listing.tell(WorkerRemoved(address))
                listing.tell(WorkerAdded(address, step))
                listed[address] = step
            elif step == "leave":
                if listed.pop(address, None):
                    listing.tell(WorkerRemoved(address))
            elif step == "stand":
                if address in fleet.workers:
                    fake.standing.add(address)
            else:
                fake.standing.discard(address)
            await fake.move()
            assert set(fleet.workers) == listed.keys() | fake.standing
            for name, worker in fleet.workers.items():
                if name not in fake.standing:
                    assert worker.tier is listed[name]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def test_an_address_is_added_once() -> None:
    fleet = Fleet(["p:1"])
    with pytest.raises(ValueError, match="already"):
        fleet.add("p:1", Tier.PREFILL)

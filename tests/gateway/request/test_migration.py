"""A migration, message by message: in every order in which they may come, some worker has the
sequence, and only one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from baton.errors import HandoffFailed, RetriableError, WorkerLost
from baton.events import (
    Committed,
    Deferred,
    Failed,
    HandedOff,
    LocalPrefill,
    NotHandedOff,
    Offered,
    Paused,
    Preempted,
    SequenceEvent,
    Tokens,
)
from baton.types import FinishReason, KvSource, Sample
from gateway.intake.request import TextOptions
from gateway.request import state
from tests.support.fake_workers import text_of
from tests.support.gateway_world import make_spec
from tests.support.stub_world import StubWorld, in_stub_world, settle

SPEC = make_spec("a", max_tokens=50)
LOST = Failed("WORKER_LOST", "gone", is_retriable=True)
NOT_MOVED = NotHandedOff("HANDOFF_FAILED", "no")
COMMITTED = Committed(1.0, 10)
OFFERED = Offered(b"ticket", 0)


def tokens(first: int, last: int, finish: FinishReason = FinishReason.NONE) -> Tokens:
    """Each token is its index."""
    return Tokens(first, tuple(map(Sample, range(first, last + 1))), finish)


class Bench:
    """A sequence that runs `here`, and has reported tokens 0 to 2; and a worker `there`."""

    def __init__(self, world: StubWorld) -> None:
        self.world = world
        self.here, self.there = world.links["here"], world.links["there"]

    @property
    def is_movable(self) -> bool:
        return self.world.driver.state.is_movable(self.world.choice)

    async def order(self) -> None:
        assert self.is_movable
        self.world.migrate("there")
        await settle()
        assert not self.is_movable

    async def emit(self, *messages: tuple[str, SequenceEvent]) -> None:
        """Each arrives alone."""
        for address, event in messages:
            await self.world.emit(address, event)

    async def reach(self, stage: str) -> None:
        """Go on with a migration up to a stage of it."""
        await self.order()
        for name, message in (("paused", ("here", Paused())), ("offered", ("there", OFFERED))):
            if stage == "ordered":
                return
            await self.emit(message)
            if name == stage:
                return

    def check_is(self, address: str, num_ended: int = 1) -> None:
        """It runs in this place alone, the migration is over, and a next one may come."""
        assert not self.world.running.done()
        assert not self.world.choice.failures
        assert self.world.timeline.num_resumes == 0
        assert self.world.num_migrations_ended == num_ended
        in_flight = {a: w.num_in_flight for a, w in self.world.fleet.workers.items()}
        assert in_flight == {"here": 0, "there": 0, address: 1}
        assert self.world.timeline.decode_worker == address
        assert self.is_movable

    def check_lost(self, error: type[RetriableError]) -> None:
        """It waits to be placed anew, with all its tokens."""
        assert self.world.num_migrations_ended == 1
        assert [type(failure) for failure in self.world.choice.failures] == [error]
        assert self.world.timeline.num_resumes == 1
        in_flight = [worker.num_in_flight for worker in self.world.fleet.workers.values()]
        assert in_flight == [0, 0]
        assert not self.here.open_handles
        assert not self.there.open_handles
        assert self.world.dispatcher.num_waiting == 1

    def taken(self) -> list[int]:
        return self.world.client.token_ids


def on_bench(test: Callable[[Bench], Awaitable[None]], stop: tuple[str, ...] = ()) -> None:
    async def run(world: StubWorld) -> None:
        bench = Bench(world)
        await bench.emit(("here", LocalPrefill(0)), ("here", tokens(0, 2)))
        world.leave_room_at()
        await test(bench)

    in_stub_world(run, SPEC, prefills=(), decodes=("here", "there"), text=TextOptions(stop=stop))


@pytest.fixture(autouse=True)
def first_place_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose the first by name of equal workers."""
    monkeypatch.setattr("gateway.routing.router._tie", lambda _key, address: address.encode())


@pytest.mark.parametrize(
    "messages",
    [
        [("here", HandedOff()), ("there", COMMITTED), ("there", tokens(5, 6))],
        [("there", COMMITTED), ("here", HandedOff()), ("there", tokens(5, 6))],
        [("there", COMMITTED), ("there", tokens(5, 6)), ("here", HandedOff())],
        # The worker here never hears that the KV has arrived.
        [("there", COMMITTED), ("here", NOT_MOVED), ("there", tokens(5, 6))],
        [("there", COMMITTED), ("there", tokens(5, 6)), ("here", NOT_MOVED)],
        [("there", COMMITTED), ("here", LOST), ("there", tokens(5, 6))],
        [("there", COMMITTED), ("there", tokens(5, 6)), ("here", LOST)],
    ],
)
def test_it_goes_on_there_once_the_kv_is_there(messages: list[tuple[str, SequenceEvent]]) -> None:
    async def test(bench: Bench) -> None:
        await bench.order()
        assert bench.here.commands[-1] == ("pause", 1)
        await bench.emit(("here", tokens(3, 4)), ("here", Paused()))
        assert bench.there.commands == [("open", KvSource.HANDOFF)]
        assert bench.there.specs[0].output_token_ids == (0, 1, 2, 3, 4)
        await bench.emit(("there", OFFERED))
        assert bench.here.commands[-1] == ("hand_off", 1, b"ticket")
        await bench.emit(*messages)
        bench.check_is("there")
        assert ("resume", 1) not in bench.here.commands
        assert not bench.here.open_handles
        await bench.emit(("there", tokens(7, 9)))
        assert bench.taken() == list(range(10))

    on_bench(test)


def test_a_worker_that_holds_all_its_kv_already_needs_none() -> None:
    async def test(bench: Bench) -> None:
        await bench.reach("paused")
        await bench.emit(("there", LocalPrefill(7)), ("there", tokens(3, 3)))
        bench.check_is("there")
        assert bench.here.commands[-1] == ("abort", 1)

    on_bench(test)


def test_tokens_that_came_before_the_pause_go_along_however_late_they_are_read() -> None:
    async def test(bench: Bench) -> None:
        await bench.order()
        bench.here.emit(tokens(3, 4))
        bench.here.emit(Paused())
        assert bench.there.specs[0].output_token_ids == (0, 1, 2, 3, 4)
        assert bench.taken() == [0, 1, 2]

    on_bench(test)


@pytest.mark.parametrize("event", [Deferred("full"), LOST, Preempted()])
def test_no_room_there_lets_it_go_on_here_at_once(event: SequenceEvent) -> None:
    async def test(bench: Bench) -> None:
        await bench.reach("paused")
        await bench.emit(("there", event))
        assert bench.here.commands[-1] == ("resume", 1)
        bench.check_is("here")
        await bench.emit(("here", tokens(3, 5)))
        assert bench.taken() == list(range(6))

    on_bench(test)


def test_an_opening_without_an_answer_lets_it_go_on_here() -> None:
    async def test(bench: Bench) -> None:
        await bench.reach("paused")
        await asyncio.sleep(state.OPEN_TIMEOUT_S + 1)
        assert bench.here.commands[-1] == ("resume", 1)
        assert bench.there.commands[-1] == ("abort", 1)
        bench.check_is("here")

    on_bench(test)


def test_a_sequence_that_cannot_be_paused_goes_on_here() -> None:
    async def test(bench: Bench) -> None:
        await bench.order()
        await bench.emit(("here", NOT_MOVED))
        bench.check_is("here")
        assert bench.there.commands == []
        assert not bench.world.fleet.broken_pairs.barred_from("there"), "nothing was sent"

    on_bench(test)


def test_a_pause_in_vain_is_taken_back_and_a_late_answer_does_nothing() -> None:
    async def test(bench: Bench) -> None:
        await bench.order()
        await asyncio.sleep(state.PAUSE_TIMEOUT_S + 1)
        assert bench.here.commands[-1] == ("resume", 1)
        bench.check_is("here")
        await bench.emit(("here", Paused()), ("here", tokens(3, 4)))
        assert bench.taken() == list(range(5))
        assert bench.there.commands == []

    on_bench(test)


def test_a_late_answer_to_an_earlier_pause_opens_no_second_place() -> None:
    async def test(bench: Bench) -> None:
        await bench.order()
        await asyncio.sleep(state.PAUSE_TIMEOUT_S + 1)
        await bench.order()
        await bench.emit(("here", Paused()), ("here", tokens(3, 4)), ("here", Paused()))
        assert bench.there.commands == [("open", KvSource.HANDOFF)]
        # The tokens that came since are not in the ticket: it cannot be handed off, and goes on
        # here.
        await bench.emit(("there", OFFERED), ("here", NOT_MOVED))
        bench.check_is("here", num_ended=2)

    on_bench(test)


@pytest.mark.parametrize("order", ["there first", "here first"])
def test_a_handoff_that_fails_is_resumed_when_the_worker_here_has_said_so(order: str) -> None:
    """Not before: until then it is sending, and would not listen."""

    async def test(bench: Bench) -> None:
        await bench.reach("offered")
        if order == "there first":
            await bench.emit(("there", LOST))
            assert ("resume", 1) not in bench.here.commands
        await bench.emit(("here", NOT_MOVED))
        assert bench.here.commands[-1] == ("resume", 1)
        bench.check_is("here")
        # A place there that was lost says nothing of the way.
        barred = bench.world.fleet.broken_pairs.barred_from("there")
        assert barred == ({"here"} if order == "here first" else set())
        if order == "here first":
            assert bench.there.commands[-1] == ("abort", 1)
            await bench.emit(("there", COMMITTED), ("there", tokens(3, 3)))
        await bench.emit(("here", tokens(3, 5)))
        assert bench.taken() == list(range(6))

    on_bench(test)


@pytest.mark.parametrize(
    "messages",
    [
        [("here", HandedOff()), ("there", LOST)],
        [("there", LOST), ("here", HandedOff())],
        [("there", COMMITTED), ("here", HandedOff()), ("there", LOST)],
        [("there", COMMITTED), ("here", LOST), ("there", LOST)],
        [("here", LOST)],
    ],
)
def test_what_is_in_neither_place_is_lost_once(messages: list[tuple[str, SequenceEvent]]) -> None:
    async def test(bench: Bench) -> None:
        await bench.reach("offered")
        await bench.emit(*messages)
        bench.check_lost(WorkerLost)

    on_bench(test)


@pytest.mark.parametrize("stage", ["ordered", "paused", "offered"])
def test_its_loss_here_ends_the_migration(stage: str) -> None:
    async def test(bench: Bench) -> None:
        await bench.reach(stage)
        await bench.emit(("here", LOST))
        bench.check_lost(WorkerLost)

    on_bench(test)


@pytest.mark.parametrize("is_there_lost", [False, True])
def test_a_transfer_without_an_end_is_given_up_in_both_places(*, is_there_lost: bool) -> None:
    async def test(bench: Bench) -> None:
        await bench.reach("offered")
        if is_there_lost:
            await bench.emit(("there", LOST))
        await asyncio.sleep(state.HANDOFF_TIMEOUT_S + 1)
        bench.check_lost(HandoffFailed)
        assert bench.here.commands[-1] == ("abort", 1)
        assert is_there_lost or bench.there.commands[-1] == ("abort", 1)

    on_bench(test)


@pytest.mark.parametrize("stage", ["ordered", "paused", "offered"])
def test_giving_up_in_mid_migration_gives_both_places_back(stage: str) -> None:
    async def test(bench: Bench) -> None:
        await bench.reach(stage)
        bench.world.running.cancel()
        await settle()
        assert bench.world.num_migrations_ended == 1
        bench.world.check_empty()
        await bench.emit(("there", Offered(b"late", 0)))
        assert ("hand_off", 1, b"late") not in bench.here.commands

    on_bench(test)


@pytest.mark.parametrize("stage", ["ordered", "paused", "offered"])
def test_an_output_that_ends_in_mid_migration_ends_it(stage: str) -> None:
    """Its client has read late what completes its stop string."""

    async def test(bench: Bench) -> None:
        bench.world.client.read_s = 5.0
        await bench.emit(("here", tokens(3, 4)), ("here", tokens(5, 6)))
        await bench.reach(stage)
        await asyncio.sleep(7.0)
        assert bench.world.num_migrations_ended == 1
        assert not bench.here.open_handles
        assert not bench.there.open_handles
        await asyncio.sleep(5.0)
        assert bench.world.running.done()
        assert bench.taken() == list(range(6))

    on_bench(test, stop=(text_of([5]),))


def test_only_a_sequence_that_decodes_can_be_moved() -> None:
    async def test(world: StubWorld) -> None:
        assert not world.driver.state.is_movable(world.choice)
        await world.emit("here", LocalPrefill(0))
        assert not world.driver.state.is_movable(world.choice), "it prefills"
        await world.emit("here", tokens(0, 0))
        assert world.driver.state.is_movable(world.choice)
        await world.emit("here", tokens(1, 1, FinishReason.STOP))
        assert not world.driver.state.is_movable(world.choice)

    in_stub_world(test, SPEC, prefills=(), decodes=("here", "there"))

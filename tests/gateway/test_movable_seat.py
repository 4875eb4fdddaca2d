"""A move, message by message: in every order in which they may come, somebody has the sequence, and only one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

import pytest

from baton.errors import BatonError, HandoffFailed, WorkerLost
from baton.events import (
    Committed,
    Deferred,
    Failed,
    HandedOff,
    HandOffFailed,
    LocalPrefill,
    Offered,
    Paused,
    Preempted,
    SequenceEvent,
    Tokens,
)
from baton.types import FinishReason, KvSource, Rank, Sample, SequenceSpec, Tier, WorkerLoad
from gateway import movable_seat
from gateway.attempt import Attempt
from gateway.choice import Left
from gateway.fleet import Fleet
from gateway.movable_seat import MovableSeat
from gateway.placement import Placement
from gateway.timing import Timeline
from tests.support.fake_workers import make_info
from tests.support.gateway_world import make_spec
from tests.support.stub_link import StubLink
from tests.support.virtual_loop import run_virtual

SPEC = make_spec("a", max_tokens=50)
LOST = Failed("WORKER_LOST", "gone", is_retriable=True)
NOT_MOVED = HandOffFailed("HANDOFF_FAILED", "no")
COMMITTED = Committed(1.0, 10)


def tokens(first: int, last: int, finish: FinishReason = FinishReason.NONE) -> Tokens:
    """Each token is its index."""
    return Tokens(first, tuple(map(Sample, range(first, last + 1))), finish)


@dataclass
class Bench:
    """A sequence that runs here, and has told tokens 0 to 2; and a worker there."""

    fleet: Fleet = field(default_factory=lambda: Fleet([], ["here", "there"]))
    here: StubLink = field(default_factory=StubLink)
    there: StubLink = field(default_factory=StubLink)
    taken: list[int] = field(default_factory=list)
    left: Left | None = None
    num_ends: int = 0
    moved_to: str = ""
    attempts: list[Attempt] = field(default_factory=list)

    def __post_init__(self) -> None:
        for address, link in (("here", self.here), ("there", self.there)):
            self.fleet.join_decode(address, make_info(address, Tier.DECODE), link)
            self.fleet.report(address, WorkerLoad())
        attempt = self.open_at(self.claim("here"), None)
        attempt.open()
        self.here.tell(LocalPrefill(0))
        self.here.tell(tokens(0, 2))
        self.seat = MovableSeat(attempt.seats[0], self)
        self.follower = asyncio.create_task(self.follow())

    # movable_seat.Passenger

    @property
    def rank(self) -> Rank:
        return SPEC.rank

    @property
    def num_tokens(self) -> int:
        return SPEC.num_tokens + len(self.taken)

    def spec_so_far(self) -> SequenceSpec:
        return SPEC.extended(tuple(self.taken))

    def open_at(self, placement: Placement, hand_over: Callable[[bytes], None] | None) -> Attempt:
        now_s = asyncio.get_running_loop().time()
        attempt = Attempt(
            placement, self.spec_so_far(), Timeline(now_s), now_s + 1e6, hand_over=hand_over
        )
        self.attempts.append(attempt)
        return attempt

    def has_moved(self, placement: Placement) -> None:
        self.moved_to = placement.decode_name

    # What the tests do

    def claim(self, address: str) -> Placement:
        worker = self.fleet.workers[address]
        return Placement(self.fleet, len(self.attempts), None, worker, 1, 1)

    async def follow(self) -> None:
        while True:
            for event in await self.seat.take_all():
                if not isinstance(event, Tokens):
                    self.left = event
                    return
                for index, sample in enumerate(event.samples, start=event.token_index):
                    assert index == sample.token_id
                    assert index <= len(self.taken), "a gap"
                    if index == len(self.taken):
                        self.taken.append(index)

    def ended(self) -> None:
        self.num_ends += 1

    async def order(self) -> None:
        await settle()
        assert self.seat.is_movable
        self.seat.order(self.claim("there"), self.ended)
        await settle()
        assert not self.seat.is_movable

    async def tell(self, *messages: tuple[str, SequenceEvent]) -> None:
        """Each arrives alone."""
        for address, event in messages:
            (self.here if address == "here" else self.there).tell(event)
            await settle()

    async def reach(self, stage: str) -> None:
        """Go on with a move up to a stage of it."""
        await self.order()
        for name, message in (
            ("paused", ("here", Paused())),
            ("offered", ("there", Offered(b"ticket", 0))),
        ):
            await self.tell(message)
            if name == stage:
                return

    def check_is(self, address: str) -> None:
        """It runs in this place alone, the move is over, and a next one may come."""
        assert self.left is None
        assert self.num_ends == 1
        in_flight = {a: w.num_in_flight for a, w in self.fleet.workers.items()}
        assert in_flight == {"here": 0, "there": 0, address: 1}
        assert self.seat.placement.decode_name == address
        assert self.moved_to == ("there" if address == "there" else "")

    def check_lost(self, kind: type[object]) -> None:
        assert isinstance(self.left, kind)
        self.seat.close()
        assert self.num_ends == 1
        assert all(worker.num_in_flight == 0 for worker in self.fleet.workers.values())


async def settle() -> None:
    """Let all that is ready run."""
    await asyncio.sleep(1e-9)


def on_bench(test: Callable[[Bench], Coroutine[None, None, None]]) -> None:
    async def main() -> None:
        bench = Bench()
        try:
            await test(bench)
        finally:
            bench.follower.cancel()
            await asyncio.gather(bench.follower, return_exceptions=True)
            bench.seat.close()
        assert all(worker.num_in_flight == 0 for worker in bench.fleet.workers.values())
        assert not any(attempt.is_open for attempt in bench.attempts)

    run_virtual(main())


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
        await bench.tell(("here", tokens(3, 4)), ("here", Paused()))
        assert bench.there.commands == [("open", KvSource.HANDOFF)]
        assert bench.there.specs[0].output_token_ids == (0, 1, 2, 3, 4)
        await bench.tell(("there", Offered(b"ticket", 0)))
        assert bench.here.commands[-1] == ("hand_off", 1, b"ticket")
        await bench.tell(*messages)
        bench.check_is("there")
        assert ("resume", 1) not in bench.here.commands
        await bench.tell(("there", tokens(7, 9)))
        assert bench.taken == list(range(10))

    on_bench(test)


def test_a_worker_that_holds_all_its_kv_already_needs_none() -> None:
    async def test(bench: Bench) -> None:
        await bench.reach("paused")
        await bench.tell(("there", LocalPrefill(7)), ("there", tokens(3, 3)))
        bench.check_is("there")
        assert bench.here.commands[-1] == ("abort", 1)

    on_bench(test)


def test_tokens_told_before_the_pause_go_along_however_late_they_are_taken() -> None:
    async def test(bench: Bench) -> None:
        await bench.order()
        bench.here.tell(tokens(3, 4))
        bench.here.tell(Paused())
        await settle()
        assert bench.there.specs[0].output_token_ids == (0, 1, 2, 3, 4)

    on_bench(test)


@pytest.mark.parametrize("event", [Deferred("full"), LOST, Preempted()])
def test_no_room_there_lets_it_go_on_here_at_once(event: SequenceEvent) -> None:
    async def test(bench: Bench) -> None:
        await bench.reach("paused")
        await bench.tell(("there", event))
        assert bench.here.commands[-1] == ("resume", 1)
        bench.check_is("here")
        await bench.tell(("here", tokens(3, 5)))
        assert bench.taken == list(range(6))
        assert bench.seat.is_movable

    on_bench(test)


def test_a_sequence_that_cannot_be_paused_goes_on_here() -> None:
    async def test(bench: Bench) -> None:
        await bench.order()
        await bench.tell(("here", NOT_MOVED))
        bench.check_is("here")
        assert bench.there.commands == []
        assert not bench.fleet.broken_pairs.barred_from("there"), "nothing was sent"

    on_bench(test)


def test_a_pause_in_vain_is_taken_back_and_a_late_answer_does_nothing() -> None:
    async def test(bench: Bench) -> None:
        await bench.order()
        await asyncio.sleep(movable_seat.PAUSE_TIMEOUT_S + 1)
        assert bench.here.commands[-1] == ("resume", 1)
        bench.check_is("here")
        await bench.tell(("here", Paused()), ("here", tokens(3, 4)))
        assert bench.taken == list(range(5))
        assert bench.there.commands == []

    on_bench(test)


def test_a_late_answer_to_an_earlier_pause_opens_no_second_place() -> None:
    async def test(bench: Bench) -> None:
        await bench.order()
        await asyncio.sleep(movable_seat.PAUSE_TIMEOUT_S + 1)
        await bench.order()
        await bench.tell(("here", Paused()), ("here", tokens(3, 4)), ("here", Paused()))
        assert bench.there.commands == [("open", KvSource.HANDOFF)]
        # The tokens told since are not in the ticket: it cannot be handed off, and goes on here.
        await bench.tell(("there", Offered(b"ticket", 0)), ("here", NOT_MOVED))
        bench.num_ends -= 1
        bench.check_is("here")

    on_bench(test)


@pytest.mark.parametrize("order", ["there first", "here first"])
def test_a_handoff_that_fails_is_resumed_when_the_worker_here_has_said_so(order: str) -> None:
    """Not before: until then it is sending, and would not listen."""

    async def test(bench: Bench) -> None:
        await bench.reach("offered")
        if order == "there first":
            await bench.tell(("there", LOST))
            assert ("resume", 1) not in bench.here.commands
        await bench.tell(("here", NOT_MOVED))
        assert bench.here.commands[-1] == ("resume", 1)
        bench.check_is("here")
        # A place there that was lost says nothing of the way.
        barred = bench.fleet.broken_pairs.barred_from("there")
        assert barred == ({"here"} if order == "here first" else set())
        if order == "here first":
            assert bench.there.commands[-1] == ("abort", 1)
            await bench.tell(("there", COMMITTED), ("there", tokens(3, 3)))
        await bench.tell(("here", tokens(3, 5)))
        assert bench.taken == list(range(6))

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
        await bench.tell(*messages)
        bench.check_lost(WorkerLost)

    on_bench(test)


@pytest.mark.parametrize("stage", ["ordered", "paused", "offered"])
def test_its_loss_here_ends_the_move(stage: str) -> None:
    async def test(bench: Bench) -> None:
        await bench.reach(stage) if stage != "ordered" else await bench.order()
        await bench.tell(("here", LOST))
        bench.check_lost(BatonError)

    on_bench(test)


def test_a_transfer_without_an_end_is_given_up_in_both_places() -> None:
    async def test(bench: Bench) -> None:
        await bench.reach("offered")
        await asyncio.sleep(movable_seat.HANDOFF_TIMEOUT_S + 1)
        bench.check_lost(HandoffFailed)
        assert bench.here.commands[-1] == bench.there.commands[-1] == ("abort", 1)

    on_bench(test)


@pytest.mark.parametrize("stage", ["ordered", "paused", "offered"])
def test_closing_in_mid_move_gives_both_places_back(stage: str) -> None:
    async def test(bench: Bench) -> None:
        await bench.reach(stage) if stage != "ordered" else await bench.order()
        bench.follower.cancel()
        bench.seat.close()
        assert bench.num_ends == 1
        assert all(worker.num_in_flight == 0 for worker in bench.fleet.workers.values())
        bench.there.tell(Offered(b"late", 0))
        await settle()
        assert ("hand_off", 1, b"late") not in bench.here.commands

    on_bench(test)


def test_only_a_sequence_that_decodes_and_is_waited_for_can_be_moved() -> None:
    async def main() -> None:
        bench = Bench()
        assert not bench.seat.is_movable, "nobody waits for its tokens yet"
        await settle()
        assert bench.seat.is_movable
        bench.follower.cancel()
        await asyncio.gather(bench.follower, return_exceptions=True)
        attempt = bench.open_at(bench.claim("there"), None)
        attempt.open()
        bench.there.tell(LocalPrefill(0))
        seat = MovableSeat(attempt.seats[0], bench)
        waiting = asyncio.create_task(seat.take_all())
        await settle()
        assert not seat.is_movable, "it prefills"
        bench.there.tell(tokens(0, 0))
        await waiting
        waiting = asyncio.create_task(seat.take_all())
        await settle()
        assert seat.is_movable
        waiting.cancel()
        seat.close()
        bench.seat.close()

    run_virtual(main())

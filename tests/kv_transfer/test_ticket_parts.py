"""A ticket that several senders fill, each with a part."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from baton.errors import InvalidRequest, StartupError
from baton.types import KvLayout, Sample, Sampling, SequenceSpec, WorkerIdentity
from engine.kv.part import KvPart
from engine.kv.range import KvRange
from kv_transfer.ticket import (
    MAX_TICKET_BYTES,
    Commit,
    Endpoint,
    OwnerRank,
    Rejection,
    Reservation,
    TicketAborted,
    TicketCommitted,
    TicketEvent,
    TicketOffered,
    TicketState,
    parse_ticket,
    ticket_message,
)
from kv_transfer.ticket_group import TicketGroup
from kv_transfer.ticket_table import TicketMint, TicketRules, TicketTable

LAYOUT = KvLayout("m", 2, 2, 1, "float32", 4)
OWNER = WorkerIdentity("d0", 1)
FIRST, SECOND = KvPart(0, 2, 0, 1), KvPart(0, 2, 1, 1)
WHOLE = KvPart.whole(LAYOUT)
LEASE_S, OFFER_S = 10.0, 4.0
SPEC = SequenceSpec("r", (1, 2, 3, 4), Sampling())


class World:
    """A rank that holds the whole model, whose tickets come in two parts of heads."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[TicketEvent] = []
        self.warned: list[int] = []
        ids = itertools.count(1)
        self.rules = TicketRules(LEASE_S, OFFER_S, b"s" * 32, lambda: next(ids))
        self.table = TicketTable(
            OWNER, LAYOUT, (), self.rules, self.events.append, lambda: self.now
        )
        self.ticket = self.table.offer(SPEC, (0,), 0, 4)

    def begin(self, connection: int, part: KvPart) -> Rejection | None:
        return self.table.begin(
            *(self.ticket.data, connection), lambda *_: self.warned.append(connection), part
        )

    def write(self, connection: int) -> None:
        number = self.ticket.ticket_id
        assert not isinstance(self.table.pin(number, 1, connection, KvRange(0, 4, 0, 2)), Rejection)
        self.table.unpin(number, connection, connection, 10)

    def commit(self, connection: int, token: int = 7) -> Rejection | None:
        commit = Commit(self.ticket.ticket_id, 1, 4, (Sample(token),), connection, 1.0)
        return self.table.commit(commit, connection)


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_it_is_committed_with_its_last_part(world: World, order: tuple[int, int]) -> None:
    assert world.begin(1, FIRST) is world.begin(2, SECOND) is None
    for connection in order:
        assert world.events == []
        world.write(connection)
        assert world.commit(connection) is None
    (event,) = world.events
    assert isinstance(event, TicketCommitted)
    assert (event.num_tokens, event.num_bytes) == (4, 20)


def test_all_parts_of_a_sender_need_not_be_presented_at_once(world: World) -> None:
    world.begin(1, FIRST)
    world.write(1)
    assert world.commit(1) is None
    assert world.events == []
    assert world.table.state(world.ticket.ticket_id) is TicketState.RECEIVING
    world.now = OFFER_S - 1
    assert world.begin(2, SECOND) is None
    world.write(2)
    assert world.commit(2) is None
    assert isinstance(world.events[0], TicketCommitted)


def test_a_part_that_never_comes_ends_it_however_alive_another_is(world: World) -> None:
    world.begin(1, FIRST)
    world.now = OFFER_S - 1
    assert world.table.renew(world.ticket.ticket_id, 1) is None
    world.table.expire()
    assert world.events == []
    world.now = OFFER_S
    world.table.expire()
    (event,) = world.events
    assert isinstance(event, TicketAborted)
    assert "all parts" in event.message
    assert world.warned == [1]


def test_a_part_that_falls_silent_ends_it_however_alive_another_is(world: World) -> None:
    world.begin(1, FIRST)
    world.begin(2, SECOND)
    world.now = LEASE_S - 1
    assert world.table.renew(world.ticket.ticket_id, 1) is None
    world.now = LEASE_S
    world.table.expire()
    assert isinstance(world.events[0], TicketAborted)


def test_a_complete_part_needs_neither_lease_nor_connection(world: World) -> None:
    world.begin(1, FIRST)
    world.begin(2, SECOND)
    world.write(1)
    world.commit(1)
    world.now = LEASE_S - 1
    world.table.renew(world.ticket.ticket_id, 2)
    world.now = LEASE_S + 1
    world.table.expire()
    world.table.close_connection(1, "idle")
    assert world.events == []
    refused = world.table.pin(world.ticket.ticket_id, 1, 1, KvRange(0, 1, 0, 1))
    assert isinstance(refused, Rejection), "nothing comes after a commit"
    world.write(2)
    world.commit(2)
    assert isinstance(world.events[0], TicketCommitted)


def test_a_lost_part_ends_it_and_the_other_sender_learns_it(world: World) -> None:
    world.begin(1, FIRST)
    world.begin(2, SECOND)
    world.write(2)
    world.table.close_connection(1, "lost")
    assert isinstance(world.events[0], TicketAborted)
    assert world.warned == [2]
    assert isinstance(world.commit(2), Rejection)


@pytest.mark.parametrize("part", [FIRST, WHOLE, KvPart(1, 1, 0, 1)])
def test_what_was_presented_is_not_presented_again(world: World, part: KvPart) -> None:
    world.begin(1, FIRST)
    assert isinstance(world.begin(2, part), Rejection)
    assert world.begin(3, SECOND) is None
    assert world.events == []


def test_parts_that_end_differently_end_it(world: World) -> None:
    world.begin(1, FIRST)
    world.begin(2, SECOND)
    world.write(1)
    world.write(2)
    assert world.commit(1, 7) is None
    assert isinstance(world.commit(2, 8), Rejection)
    assert isinstance(world.events[0], TicketAborted)


# Of several ranks of the owner


RANKS = (
    OwnerRank(FIRST, (Endpoint("tcp", "h:1"),)),
    OwnerRank(SECOND, (Endpoint("tcp", "h:2"), Endpoint("shm", "/s", "boot"))),
)


def test_a_ticket_names_the_owners_ranks_and_all_of_it_is_signed() -> None:
    mint = TicketMint(OWNER, LAYOUT, (), TicketRules(secret=b"s" * 32), RANKS)
    reserved = mint.reserve(SPEC, (0,), 0, 4, 9.0, 0, {})
    assert parse_ticket(reserved.data).ranks == RANKS
    table = TicketTable(
        *(OWNER, FIRST.layout(LAYOUT), (), TicketRules(secret=b"s" * 32), lambda _: None),
        lambda: 0.0,
        part=FIRST,
    )
    table.put(reserved)
    message = ticket_message(reserved.data)
    message.ranks[1].endpoints[0].address = "h:9"
    assert isinstance(table.begin(message.SerializeToString(), 1), Rejection)
    assert table.begin(reserved.data, 1) is None


@pytest.mark.parametrize("parts", [(FIRST,), (FIRST, WHOLE), (FIRST, KvPart(0, 1, 1, 1))])
def test_ranks_that_do_not_make_up_the_model_are_refused(parts: tuple[KvPart, ...]) -> None:
    ranks = tuple(OwnerRank(part, ()) for part in parts)
    mint = TicketMint(OWNER, LAYOUT, (), TicketRules(secret=b"s" * 32), ranks)
    with pytest.raises(InvalidRequest, match="contradict"):
        parse_ticket(mint.reserve(SPEC, (0,), 0, 4, 9.0, 0, {}).data)


def test_ranks_that_no_ticket_can_name_are_refused_at_the_start() -> None:
    def mint(num_ranks: int) -> TicketMint:
        endpoint = Endpoint("tcp", "10.0.0.1:50051", "0f" * 18)
        ranks = (OwnerRank(KvPart(0, 1, 0, 1), (endpoint,)),) * num_ranks
        return TicketMint(OWNER, LAYOUT, (), TicketRules(secret=b"s" * 32), ranks)

    with pytest.raises(StartupError, match="use at most ") as refused:
        mint(1000)
    most = int(refused.value.message.split("use at most ")[1].split()[0])
    assert 150 < most < 300
    longest = replace(SPEC, request_id="r" * 200, traceparent="t" * 55, tenant=b"t" * 64)
    assert len(mint(most).reserve(longest, (0,), 0, 4, 9.0, 0, {}).data) <= MAX_TICKET_BYTES


class Remote:
    """A rank's table. is_near: calls have arrived when they return."""

    def __init__(self, *, is_near: bool = True) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.is_near = is_near

    def put(self, reservation: Reservation) -> bool:
        self.calls.append(("put", reservation.ticket_id))
        return self.is_near

    def abort(self, ticket_id: int, reason: str, message: str) -> None:
        self.calls.append(("abort", ticket_id, reason, message))

    def expire(self) -> None:
        self.calls.append(("expire",))

    def release(self, ticket_id: int) -> None:
        self.calls.append(("release", ticket_id))


def test_a_group_reports_an_end_when_all_its_ranks_have() -> None:
    events: list[TicketEvent] = []
    ranks = (Remote(), Remote())
    mint = TicketMint(OWNER, LAYOUT, (), TicketRules(secret=b"s" * 32), RANKS)
    group = TicketGroup(mint, ranks, events.append)
    committed = TicketCommitted(1, 4, (Sample(7),), 1.0, 10, 5.0, 6.0)
    for second, is_committed in (
        (TicketCommitted(1, 4, (Sample(7),), 2.0, 10, 4.0, 7.0, 3), True),
        (TicketCommitted(1, 4, (Sample(8),), 2.0, 10), False),
        (TicketAborted(1, "HANDOFF_FAILED", "lost"), False),
    ):
        number = group.offer(SPEC, (0,), 0, 4).ticket_id
        assert group.num_open == 1
        with pytest.raises(ValueError, match="not ended"):
            group.release(number)
        for rank, event in enumerate((committed, second)):
            assert events == []
            group.on_rank_event(rank, replace(event, ticket_id=number))
        (end,) = events
        assert isinstance(end, TicketCommitted) is is_committed
        if isinstance(end, TicketCommitted):
            assert (end.num_bytes, end.transfer_exposed_ms, end.whole_start) == (20, 2.0, 3)
            assert (end.reserved_s, end.receiving_s) == (4.0, 6.0)
        events.clear()
        group.release(number)
        assert group.num_open == 0


def test_the_first_abort_of_a_rank_goes_to_the_others() -> None:
    events: list[TicketEvent] = []
    ranks = (Remote(), Remote())
    mint = TicketMint(OWNER, LAYOUT, (), TicketRules(secret=b"s" * 32), RANKS)
    group = TicketGroup(mint, ranks, events.append)
    number = group.offer(SPEC, (0,), 0, 4).ticket_id
    first = TicketAborted(number, "HANDOFF_FAILED", "first")
    group.on_rank_event(1, first)
    assert ranks[0].calls == [("put", number), ("abort", number, "HANDOFF_FAILED", "first")]
    assert events == []
    group.on_rank_event(0, TicketAborted(number, "HANDOFF_FAILED", "second"))
    assert events == [first]


def test_a_ticket_is_shown_when_all_ranks_have_it() -> None:
    events: list[TicketEvent] = []
    mint = TicketMint(OWNER, LAYOUT, (), TicketRules(secret=b"s" * 32), RANKS)
    near = TicketGroup(mint, (Remote(), Remote()), events.append)
    assert near.offer(SPEC, (0,), 0, 4).is_known
    far = TicketGroup(mint, (Remote(), Remote(is_near=False), Remote(is_near=False)), events.append)
    offered = far.offer(SPEC, (0,), 0, 4)
    assert not offered.is_known
    far.on_rank_offered(offered.ticket_id)
    assert events == []
    far.on_rank_offered(offered.ticket_id)
    assert events == [TicketOffered(offered.ticket_id)]

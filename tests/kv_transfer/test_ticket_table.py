"""Whatever happens in whatever order: one event per ticket, no writer after its death, no commit
with holes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from baton.types import KvLayout, Sample, Sampling, SequenceSpec, WorkerIdentity
from engine.kv.range import KvRange
from kv_transfer.ticket import (
    Commit,
    Rejection,
    TicketAborted,
    TicketCommitted,
    TicketEvent,
    TicketState,
)
from kv_transfer.ticket_table import Pinned, TicketRules, TicketTable

NUM_LAYERS = 2
LEASE_S = 10.0
OFFER_S = 4.0
LAYOUT = KvLayout("m", NUM_LAYERS, 1, 1, "float32", 2)
OWNER = WorkerIdentity("d0", 9)

CONNECTIONS = st.integers(1, 2)
SPANS = st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(0, 1), st.integers(1, 2))


@dataclass
class Model:
    """What must be true of one ticket."""

    data: bytes
    cached: int
    num_tokens: int
    connection: int = 0
    arrived: set[tuple[int, int]] = field(default_factory=set)
    checksum: int = 0
    num_pins: int = 0
    deadline: float = 0.0
    is_dying: bool = False
    is_released: bool = False
    events: list[TicketEvent] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        return not (self.is_dying or self.events or self.is_released)

    @property
    def missing(self) -> set[tuple[int, int]]:
        whole = itertools.product(range(self.cached, self.num_tokens), range(NUM_LAYERS))
        return set(whole) - self.arrived


class Tickets(RuleBasedStateMachine):
    tickets = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.models: dict[int, Model] = {}
        ids = itertools.count(1)
        self.table = TicketTable(
            OWNER,
            LAYOUT,
            (),
            TicketRules(LEASE_S, OFFER_S, b"s" * 32, ids.__next__),
            self.on_event,
            lambda: self.now,
        )

    def on_event(self, event: TicketEvent) -> None:
        model = self.models[event.ticket_id]
        assert model.num_pins == 0, "told while a writer is in the blocks"
        model.events.append(event)

    def live(self, ticket_id: int, connection: int) -> bool:
        model = self.models[ticket_id]
        return model.is_open and model.connection == connection != 0

    @rule(target=tickets, cached=st.integers(0, 5), extra=st.integers(0, 4))
    def offer(self, cached, extra):
        num_tokens = max(1, cached + extra)
        spec = SequenceSpec("r", tuple(range(num_tokens)), Sampling(), tenant=b"t" * 16)
        offered = self.table.offer(spec, tuple(range(5)), cached, num_tokens)
        deadline = self.now + OFFER_S
        self.models[offered.ticket_id] = Model(offered.data, cached, num_tokens, deadline=deadline)
        return offered.ticket_id

    @rule(ticket_id=tickets, connection=CONNECTIONS)
    def begin(self, ticket_id, connection):
        model = self.models[ticket_id]
        is_first = model.is_open and not model.connection
        outcome = self.table.begin(model.data, connection)
        assert isinstance(outcome, Rejection) is not is_first
        if is_first:
            model.connection, model.deadline = connection, self.now + LEASE_S

    @rule(
        ticket_id=tickets, connection=CONNECTIONS, span=SPANS, epoch=st.sampled_from([1, 1, 1, 2])
    )
    def pin(self, ticket_id, connection, span, epoch):
        self.write(ticket_id, connection, KvRange(*span), epoch)

    @rule(ticket_id=tickets, width=st.integers(1, 9))
    def pin_what_is_missing(self, ticket_id, width):
        model = self.models[ticket_id]
        if model.missing:
            token, layer = min(model.missing)
            end = token
            while end < token + width and (end, layer) in model.missing:
                end += 1
            self.write(ticket_id, model.connection, KvRange(token, end - token, layer, 1), 1)

    def write(self, ticket_id: int, connection: int, piece: KvRange, epoch: int) -> None:
        model = self.models[ticket_id]
        cells = set(
            itertools.product(
                range(piece.first_token, piece.end_token),
                range(piece.first_layer, piece.end_layer),
            )
        )
        is_live = self.live(ticket_id, connection) and epoch == 1
        is_good = is_live and cells <= model.missing
        if is_live and not is_good:
            model.is_dying = True
        outcome = self.table.pin(ticket_id, epoch, connection, piece)
        assert isinstance(outcome, Rejection) is not is_good
        if is_good:
            assert outcome == Pinned(tuple(range(5)), None)
            model.num_pins += 1
            model.arrived |= cells
            model.deadline = self.now + LEASE_S

    @rule(ticket_id=tickets, checksum=st.integers(0, 2**64 - 1))
    def unpin(self, ticket_id, checksum):
        model = self.models[ticket_id]
        if model.num_pins:
            model.num_pins -= 1
            model.checksum = (model.checksum + checksum) % 2**64
            self.table.unpin(ticket_id, model.connection, checksum, 1)

    @rule(ticket_id=tickets, connection=CONNECTIONS, wrong=st.sampled_from([0, 0, 0, 1]))
    def commit(self, ticket_id, connection, wrong):
        model = self.models[ticket_id]
        is_live = self.live(ticket_id, connection)
        is_good = is_live and not model.missing and not model.num_pins and not wrong
        if is_live and not is_good:
            model.is_dying = True
        checksum = (model.checksum + wrong) % 2**64
        commit = Commit(ticket_id, 1, model.num_tokens, (Sample(3),), checksum, 1.0)
        assert (self.table.commit(commit, connection) is None) is is_good
        if is_good:
            assert isinstance(model.events[-1], TicketCommitted)

    @rule(ticket_id=tickets)
    def abort(self, ticket_id):
        model = self.models[ticket_id]
        model.is_dying |= model.is_open
        self.table.abort(ticket_id, "CANCELLED", "enough")

    @rule(ticket_id=tickets, connection=CONNECTIONS)
    def fail(self, ticket_id, connection):
        model = self.models[ticket_id]
        model.is_dying |= self.live(ticket_id, connection)
        self.table.fail(ticket_id, 1, connection, "HANDOFF_FAILED", "broken")

    @rule(connection=CONNECTIONS)
    def lose(self, connection):
        for ticket_id, model in self.models.items():
            model.is_dying |= self.live(ticket_id, connection)
        self.table.close_connection(connection, "lost")

    @rule(ticket_id=tickets, connection=CONNECTIONS)
    def renew(self, ticket_id, connection):
        is_live = self.live(ticket_id, connection)
        assert (self.table.renew(ticket_id, connection) is None) is is_live
        if is_live:
            self.models[ticket_id].deadline = self.now + LEASE_S

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def expire(self, seconds):
        self.now += seconds
        for model in self.models.values():
            model.is_dying |= model.is_open and self.now >= model.deadline
        self.table.expire()

    @rule(ticket_id=tickets)
    def release(self, ticket_id):
        model = self.models[ticket_id]
        if model.events or model.is_released:
            model.is_released = True
            self.table.release(ticket_id)
            assert self.table.state(ticket_id) is None
        else:
            with pytest.raises(ValueError, match="event is to come"):
                self.table.release(ticket_id)

    @invariant()
    def each_ticket_has_its_one_event_in_time(self):
        for ticket_id, model in self.models.items():
            is_told = model.is_dying and not model.num_pins
            aborts = [e for e in model.events if isinstance(e, TicketAborted)]
            assert len(model.events) <= 1
            assert len(aborts) == is_told
            if not model.is_released:
                state = self.table.state(ticket_id)
                assert (state is TicketState.ABORTED) is model.is_dying
        still = sum(not m.events for m in self.models.values())
        assert self.table.num_open == still


Tickets.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, database=None
)
TestTickets = Tickets.TestCase


def test_blocks_without_room_are_not_offered():
    table = Tickets().table
    spec = SequenceSpec("r", (1, 2), Sampling())
    for cached, num_tokens in [(0, 5), (3, 2), (-1, 2)]:
        with pytest.raises(ValueError, match="room"):
            table.offer(spec, (0, 1), cached, num_tokens)

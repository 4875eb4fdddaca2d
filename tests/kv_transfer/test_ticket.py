"""One ticket: exactly what it is for may be written and committed, nothing beside it."""

from __future__ import annotations

from itertools import product

import pytest

from baton.types import KvLayout, Sample
from engine.kv.part import KvPart
from engine.kv.range import KvRange
from kv_transfer.ticket import (
    Commit,
    Reservation,
    Ticket,
    TicketAborted,
    TicketCommitted,
    TicketState,
)

NUM_LAYERS, NUM_CACHED, MIN_TOKENS, NUM_TOKENS = 2, 1, 3, 4
LEASE_S = 30.0
LAYOUT = KvLayout("m", NUM_LAYERS, 1, 1, "float32", 2)


def presented() -> Ticket:
    reserved = Reservation(7, b"", (0,), NUM_CACHED, NUM_TOKENS, MIN_TOKENS, LEASE_S)
    ticket = Ticket(reserved, LAYOUT, KvPart.whole(LAYOUT), 5.0)
    assert ticket.present(1, KvPart.whole(LAYOUT), None, 2.0) is None
    return ticket


@pytest.mark.parametrize("tokens", list(product(range(-1, 6), range(-1, 6))))
def test_a_piece_is_taken_if_all_of_it_is_wanted(tokens: tuple[int, int]) -> None:
    for first_layer, num_layers in product(range(-1, 3), range(-1, 4)):
        piece = KvRange(*tokens, first_layer, num_layers)
        is_wanted = (
            piece.num_tokens > 0
            and num_layers > 0
            and set(range(piece.first_token, piece.end_token)) <= set(range(NUM_CACHED, NUM_TOKENS))
            and set(range(first_layer, piece.end_layer)) <= set(range(NUM_LAYERS))
        )
        ticket = presented()
        assert (ticket.pin(1, piece, 3.0) == "") is is_wanted
        assert ticket.num_pins == is_wanted
        assert ticket.deadline == (3.0 if is_wanted else 2.0) + LEASE_S


@pytest.mark.parametrize("num_sent", range(NUM_CACHED, NUM_TOKENS + 1))
@pytest.mark.parametrize("num_told", range(NUM_TOKENS + 2))
def test_a_commit_is_of_what_was_sent_and_of_what_was_asked_for(
    num_sent: int, num_told: int
) -> None:
    ticket = presented()
    if num_sent > NUM_CACHED:
        assert not ticket.pin(1, KvRange(NUM_CACHED, num_sent - NUM_CACHED, 0, NUM_LAYERS), 3.0)
        assert ticket.unpin(1, 9, 100) is None
    checksum = 9 if num_sent > NUM_CACHED else 0
    outcome = ticket.commit(1, Commit(7, 1, num_told, (Sample(1),), checksum, 0.0))
    is_good = num_told == num_sent >= MIN_TOKENS
    assert isinstance(outcome, TicketCommitted) is is_good
    assert (ticket.state is TicketState.COMMITTED) is is_good


def test_an_abort_is_reported_when_the_last_writer_is_gone() -> None:
    ticket = presented()
    for token in (1, 2):
        assert not ticket.pin(1, KvRange(token, 1, 0, NUM_LAYERS), 3.0)
    assert ticket.abort("CANCELLED", "enough") is None
    assert not ticket.is_settled
    assert ticket.unpin(1, 0, 0) is None
    assert ticket.unpin(1, 0, 0) == TicketAborted(7, "CANCELLED", "enough")
    assert ticket.is_settled

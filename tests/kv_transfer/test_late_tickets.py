"""A late ticket's KV is whole, whenever its blocks come; what arrived before them is not in any
block before it is written there."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from baton.types import Sample, Sampling, SequenceSpec
from engine.kv.range import KvRange
from kv_transfer.send_connection import Finish, Send
from kv_transfer.ticket import TicketAborted, TicketCommitted
from tests.kv_transfer.conftest import MakeRig, layout_of

HOST = ["loopback", "shm", "tcp"]
NUM_TOKENS = 30


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("transport", HOST)
def test_kv_is_whole_whenever_blocks_come(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, transport: str, seed: int
) -> None:
    monkeypatch.setattr("kv_transfer.codec.MIN_VIEW_BYTES", 1)
    rng = random.Random(seed)
    source_size, size = (4, 4) if seed % 2 else (5, 3)
    rig = make_rig(transport, source_layout=layout_of(source_size), target_layout=layout_of(size))
    tickets, num_layers = rig.running.tickets, rig.target.layout.num_layers
    table = tuple(rng.sample(range(16), -(-NUM_TOKENS // size)))
    sources = tuple(rng.sample(range(16), -(-NUM_TOKENS // source_size)))
    rig.target.data[...] = -1
    num_held = rng.randint(0, 2)
    spec = SequenceSpec("r", tuple(range(NUM_TOKENS)), Sampling())
    ticket = tickets.offer(spec, table[:num_held], 0, NUM_TOKENS, is_late=True)
    rig.sender.begin("k", ticket.data)
    first = 0
    while first < NUM_TOKENS:
        end = min(NUM_TOKENS, first + rng.randint(1, 9))
        split = rng.randint(1, num_layers - 1)
        for layer, num in ((0, split), (split, num_layers - split)):
            rig.sender.submit(Send("k", sources, KvRange(first, end - first, layer, num)))
        first = end
        if rng.random() < 0.5:
            num_held = rng.randint(num_held, len(table))
            tickets.extend(ticket.ticket_id, table[:num_held])
    rig.sender.submit(Finish("k", NUM_TOKENS, (Sample(1),), time.monotonic()))
    event = rig.event()
    assert isinstance(event, TicketCommitted)
    assert rig.done().error is None
    assert tickets.arrived_end(ticket.ticket_id) == NUM_TOKENS
    assert (rig.target.data[list(table[num_held:])] == -1).all()
    for chunk in event.parked:
        chunk.write(table)
    for token in range(NUM_TOKENS):
        expected = rig.token(rig.source, sources, token)
        np.testing.assert_array_equal(rig.token(rig.target, table, token), expected)
    tickets.release(ticket.ticket_id)


def test_an_aborted_late_ticket_keeps_nothing(make_rig: MakeRig) -> None:
    rig = make_rig("loopback")
    spec = SequenceSpec("r", tuple(range(NUM_TOKENS)), Sampling())
    ticket = rig.running.tickets.offer(spec, (), 0, NUM_TOKENS, is_late=True)
    rig.sender.begin("k", ticket.data)
    rig.sender.submit(Send("k", tuple(range(8)), KvRange(0, 8, 0, rig.source.layout.num_layers)))
    rig.running.tickets.abort(ticket.ticket_id, "CANCELLED", "given up")
    assert isinstance(rig.event(), TicketAborted)
    rig.running.tickets.release(ticket.ticket_id)
    assert rig.running.tickets.arrived_end(ticket.ticket_id) == 0


def test_a_damaged_chunk_is_not_parked(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_transfer.receiver.payload_fault", lambda *_: "damaged")
    rig = make_rig("loopback")
    spec = SequenceSpec("r", tuple(range(NUM_TOKENS)), Sampling())
    ticket = rig.running.tickets.offer(spec, (), 0, NUM_TOKENS, is_late=True)
    rig.sender.begin("k", ticket.data)
    rig.send_all("k", tuple(range(8)), NUM_TOKENS)
    event = rig.event()
    assert isinstance(event, TicketAborted)
    assert "damaged" in event.message

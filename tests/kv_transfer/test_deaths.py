"""Whoever dies or gives up, at whatever point: one end for the sender, one event for the receiver,
and they agree."""

from __future__ import annotations

import queue
import socket
import time

import pytest

from baton.errors import Cancelled, HandoffFailed
from baton.types import Sample
from engine.kv.range import KvRange
from kv_transfer.send_connection import Cancel, Finish, Send
from kv_transfer.ticket import TicketAborted, TicketCommitted, TicketState
from tests.support.kv_transports import ALL

POINTS = ["before", "begun", "half sent", "sent", "committed", "settled"]
BLOCKS = (1, 2, 3, 4)
NUM_TOKENS = 10


def advance(rig, ticket, point):
    """Bring a handoff to `point`; without waiting, so that threads race with what comes next."""
    reached = POINTS.index(point)
    if reached >= 1:
        rig.sender.begin("k", ticket.data)
    if reached >= 2:
        rig.sender.submit(Send("k", BLOCKS, KvRange(0, 5, 0, 3)))
    if reached >= 3:
        rig.sender.submit(Send("k", BLOCKS, KvRange(5, 5, 0, 3)))
    if reached >= 4:
        rig.sender.submit(Finish("k", NUM_TOKENS, (Sample(1),), time.monotonic()))


def finish(rig, ticket, point):
    """Begin what was not begun, then collect both ends."""
    if point == "before":
        rig.sender.begin("k", ticket.data)
    rig.sender.submit(Finish("k", NUM_TOKENS, (Sample(1),), time.monotonic()))
    done = rig.done()
    rig.running.tickets.abort(ticket.ticket_id, "CANCELLED", "given up by its owner")
    event = rig.event()
    assert rig.sender.num_open == rig.running.tickets.num_open == 0
    for ends in (rig.dones, rig.events):
        with pytest.raises(queue.Empty):
            ends.get_nowait()
    assert isinstance(event, TicketCommitted | TicketAborted)
    assert done.error is not None or isinstance(event, TicketCommitted)
    assert not isinstance(done.error, HandoffFailed | Cancelled) or point != "settled"
    return done, event


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("transport", ALL)
@pytest.mark.parametrize("who", ["receiver", "sender", "owner", "engine"])
def test_each_side_hears_of_the_end_once(make_rig, transport, point, who):
    rig = make_rig(transport)
    ticket = rig.offer(tuple(range(4)), 0, NUM_TOKENS)
    advance(rig, ticket, point)
    if point == "settled":
        early = rig.done()
        assert early.error is None
        rig.dones.put(early)
    match who:
        case "receiver":
            rig.running.close()
        case "sender":
            rig.sender.close()
        case "owner":
            rig.running.tickets.abort(ticket.ticket_id, "CANCELLED", "the client left")
        case "engine":
            rig.sender.submit(Cancel("k", "CANCELLED", "the client left"))
    done, event = finish(rig, ticket, point)
    if who == "engine" and point in {"begun", "half sent", "sent"}:
        assert isinstance(done.error, Cancelled)
    if point not in {"committed", "settled"} and not (who == "engine" and point == "before"):
        assert isinstance(event, TicketAborted)
        assert done.error is not None


@pytest.mark.parametrize("transport", ALL)
def test_a_lost_sender_frees_the_ticket_without_waiting_for_the_lease(make_rig, transport):
    rig = make_rig(transport)
    first, second = (rig.offer(b, 0, NUM_TOKENS) for b in [tuple(range(4)), tuple(range(4, 8))])
    rig.sender.begin("a", first.data)
    rig.sender.begin("b", second.data)
    rig.send_all("b", BLOCKS, NUM_TOKENS)
    assert rig.done().key == "b"
    assert isinstance(rig.event(), TicketCommitted)
    rig.sender.close()
    event = rig.event()
    assert isinstance(event, TicketAborted)
    assert event.ticket_id == first.ticket_id
    assert "p0" in event.message


@pytest.mark.parametrize("transport", ALL)
def test_a_lane_works_again_after_its_connection_was_lost(make_rig, transport):
    rig = make_rig(transport)
    listener = rig.running.listeners[0]
    for _ in range(3):
        whole = rig.offer(tuple(range(4)), 0, NUM_TOKENS)
        rig.sender.begin("whole", whole.data)
        rig.send_all("whole", BLOCKS, NUM_TOKENS)
        assert rig.done().error is None
        assert isinstance(rig.event(), TicketCommitted)
        cut = rig.offer(tuple(range(4, 8)), 0, NUM_TOKENS)
        rig.sender.begin("cut", cut.data)
        rig.sender.submit(Send("cut", BLOCKS, KvRange(0, NUM_TOKENS, 0, 2)))
        while rig.running.tickets.state(cut.ticket_id) is not TicketState.RECEIVING:
            assert rig.dones.empty()
        if transport == "loopback":
            for connection in listener._connections:
                connection.lose("cut")
            rig.sender.heartbeat()
        else:
            for peer in tuple(listener._peers.values()):
                peer.sock.shutdown(socket.SHUT_RDWR)
        assert isinstance(rig.done().error, HandoffFailed)
        rig.running.tickets.abort(cut.ticket_id, "CANCELLED", "given up by its owner")
        assert isinstance(rig.event(), TicketAborted)


def test_an_ended_handoff_ignores_what_its_owner_still_says(make_rig):
    rig = make_rig("loopback")
    rig.send_all("never begun", BLOCKS, NUM_TOKENS)
    rig.sender.submit(Cancel("never begun", "CANCELLED", ""))
    ticket = rig.offer(tuple(range(4)), 0, NUM_TOKENS)
    rig.sender.begin("k", ticket.data)
    with pytest.raises(ValueError, match="under way"):
        rig.sender.begin("k", ticket.data)
    rig.send_all("k", BLOCKS, NUM_TOKENS)
    rig.send_all("k", BLOCKS, NUM_TOKENS)
    assert rig.done().error is None
    assert rig.dones.empty()


def test_blocks_that_cannot_be_read_end_their_handoff_alone(make_rig):
    rig = make_rig("tcp", num_credits=1)
    bad, good = (rig.offer(b, 0, NUM_TOKENS) for b in [tuple(range(4)), tuple(range(4, 8))])
    rig.sender.begin("bad", bad.data)
    rig.sender.begin("good", good.data)
    rig.sender.submit(Send("bad", (99,), KvRange(0, 3, 0, 3)))
    assert (done := rig.done()).key == "bad"
    assert done.error is not None
    assert done.error.reason == "ENGINE_FAULT"
    rig.send_all("good", BLOCKS, NUM_TOKENS)
    assert rig.done().error is None
    events = {type(event): event.ticket_id for event in (rig.event(), rig.event())}
    assert events == {TicketAborted: bad.ticket_id, TicketCommitted: good.ticket_id}

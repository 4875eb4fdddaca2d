"""A ticket that dies at its owner: the sender hears of it at once, though it says nothing
itself."""

from __future__ import annotations

import time
from typing import Any

import pytest

from baton.errors import Cancelled, HandoffFailed
from engine.kv.range import KvRange
from kv_transfer.kv_secret import KvSecret
from kv_transfer.send_connection import Send
from kv_transfer.ticket import TicketAborted, TicketState
from tests.support.kv_transports import ALL

SECRET = KvSecret(b"0123456789abcdef")


def presented(
    make_rig: Any, transport: str, secret: KvSecret | None
) -> tuple[Any, int, list[float]]:
    """A rig with a stopped clock, so that nothing is renewed, and a ticket presented in it."""
    clock = [100.0]
    rig = make_rig(transport, clock=lambda: clock[0], source_secret=secret, target_secret=secret)
    offered = rig.offer((3, 1, 0, 7), 0, 11)
    rig.sender.begin("k", offered.data)
    table = rig.running.tickets
    while table.state(offered.ticket_id) is TicketState.OFFERED:
        time.sleep(0.001)  # asking without a pause keeps the table's lock from its threads
    return rig, offered.ticket_id, clock


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize("transport", ALL)
def test_an_owner_s_abort_reaches_a_silent_sender(
    make_rig: Any, transport: str, secret: KvSecret | None
) -> None:
    rig, ticket_id, _ = presented(make_rig, transport, secret)
    rig.running.tickets.abort(ticket_id, "CANCELLED", "the gateway gave it up")
    rig.sender.heartbeat()
    done = rig.done()
    assert isinstance(done.error, Cancelled)
    assert "gave it up" in done.error.message
    assert isinstance(rig.event(), TicketAborted)


def test_the_end_of_a_lease_reaches_it_too(make_rig: Any) -> None:
    rig, _, clock = presented(make_rig, "shm", None)
    clock[0] += 31.0
    rig.running.tickets.expire()
    done = rig.done()
    assert isinstance(done.error, HandoffFailed)
    assert "no KV and no sign of life" in done.error.message


def test_others_of_the_connection_go_on(make_rig: Any) -> None:
    rig, ticket_id, _ = presented(make_rig, "tcp", SECRET)
    other = rig.offer((2, 4, 5, 6), 0, 11)
    rig.sender.begin("other", other.data)
    rig.running.tickets.abort(ticket_id, "CANCELLED", "enough")
    assert rig.done().key == "k"
    rig.send_all("other", (5, 2, 9), 11)
    done = rig.done()
    assert (done.key, done.error) == ("other", None)


def test_who_breaks_a_rule_is_told_once(make_rig: Any) -> None:
    """By the answer to its own frame."""
    rig, ticket_id, _ = presented(make_rig, "loopback", None)
    rig.sender.submit(Send("k", (5, 2, 9), KvRange(0, 11, 0, 1)))
    rig.sender.submit(Send("k", (5, 2, 9), KvRange(0, 11, 0, 1)))
    assert "came before" in rig.done().error.message
    assert rig.running.tickets.state(ticket_id) is TicketState.ABORTED
    assert rig.dones.empty()

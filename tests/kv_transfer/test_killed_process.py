"""A sender process that is killed: its ticket dies at once, without the lease."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kv_transfer.ticket import TicketAborted, TicketState
from tests.support.kv_transports import REMOTE

pytestmark = pytest.mark.slow

_SENDER = """
import sys, time
from engine.kv.range import KvRange
from baton.types import KvLayout, WorkerIdentity
from kv_transfer.send_connection import Cancel, Send
from kv_transfer.handshake import SenderConfig
from kv_transfer.sender import Sender
from kv_transfer.transport.connector import make_connector
from tests.support.device_double import DeviceArrayPool

layout = KvLayout("m", 3, 2, 4, "int64", 4)
pool = DeviceArrayPool(layout, 4)
connect = make_connector(sys.argv[1], memory=pool.memory)
sender = Sender(
    SenderConfig(WorkerIdentity("p9", 1), pool, connect, time.monotonic),
    lambda done: print("done", flush=True),
)
sender.begin("unknown", bytes.fromhex(sys.argv[3]))
sender.submit(Cancel("unknown", "CANCELLED", ""))
sender.begin("k", bytes.fromhex(sys.argv[2]))
sender.submit(Send("k", (0, 1, 2), KvRange(0, 6, 0, 3)))
sys.stdin.read()
"""


@pytest.mark.parametrize("transport", REMOTE)
def test_the_ticket_of_a_killed_sender_dies_at_once(make_rig, transport):
    rig = make_rig(transport)
    ticket, other = rig.offer((0, 1), 0, 6), rig.offer((2,), 0, 3)
    with subprocess.Popen(
        [sys.executable, "-c", _SENDER, transport, ticket.data.hex(), other.data.hex()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        while rig.running.tickets.state(ticket.ticket_id) is not TicketState.RECEIVING:
            assert process.poll() is None
        process.kill()
    deaths = {}
    while ticket.ticket_id not in deaths:
        event = rig.event()
        assert isinstance(event, TicketAborted)
        deaths[event.ticket_id] = event
    assert "p9" in deaths[ticket.ticket_id].message

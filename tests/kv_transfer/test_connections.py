"""Several connections to one worker: each handoff stays on one, and one that is stuck holds up its
own handoffs only."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from baton.types import Sample
from engine.kv.range import KvRange
from kv_transfer.frame import Frame
from kv_transfer.send_connection import Finish, Send
from kv_transfer.ticket import Endpoint, TicketCommitted
from kv_transfer.transport.connection import Connection, Connector, Staged
from tests.kv_transfer.conftest import PATIENCE_S, Rig

BLOCKS = (1, 2, 3)


class Connections:
    """Counts what a sender opens."""

    def __init__(self) -> None:
        self.opened: list[Connection] = []

    def tap(self, connect: Connector) -> Connector:
        def counted(endpoints: Sequence[Endpoint], timeout_s: float) -> Connection:
            self.opened.append(connect(endpoints, timeout_s))
            return self.opened[-1]

        return counted


def begin(rig: Rig, key: str, blocks: tuple[int, ...] = BLOCKS) -> None:
    rig.sender.begin(key, rig.offer(blocks, 0, 8).data)


def finish(rig: Rig, key: str) -> None:
    rig.sender.submit(Send(key, (4, 5), KvRange(0, 8, 0, 3)))
    rig.sender.submit(Finish(key, 8, (Sample(1),), time.monotonic()))


@pytest.mark.parametrize("transport", ["loopback", "shm", "tcp"])
def test_handoffs_that_are_under_way_together_share_the_connections_out(make_rig, transport):
    connections = Connections()
    rig = make_rig(transport, num_connections=2, tap=connections.tap)
    for number in range(4):
        begin(rig, f"k{number}", (3 * number, 3 * number + 1, 3 * number + 2))
    for number in range(4):
        finish(rig, f"k{number}")
    assert [rig.done().error for _ in range(4)] == [None] * 4
    assert all(isinstance(rig.event(), TicketCommitted) for _ in range(4))
    assert len(connections.opened) == 2


def test_one_after_the_other_needs_one_connection(make_rig):
    connections = Connections()
    rig = make_rig("loopback", num_connections=4, tap=connections.tap)
    for number in range(5):
        begin(rig, f"k{number}")
        finish(rig, f"k{number}")
        assert rig.done().error is None
    assert len(connections.opened) == 1
    assert rig.sender.num_open == 0


class Stuck:
    """A connection that sends its first chunk only when the test lets it."""

    def __init__(self, connection: Connection, let_go: threading.Event) -> None:
        self._connection = connection
        self._let_go = let_go
        self.unstage = connection.unstage
        self.stage = connection.stage
        self.flush = connection.flush
        self.receive = connection.receive
        self.fileno = connection.fileno
        self.close = connection.close

    def send(self, frame: Frame, staged: Staged | None = None, *, more: bool = False) -> None:
        if staged:
            self._let_go.wait()
        self._connection.send(frame, staged, more=more)


def test_a_stuck_connection_does_not_hold_up_the_other(make_rig):
    let_go, is_connected = threading.Event(), threading.Event()

    def tap(connect: Connector) -> Connector:
        def stuck_first(endpoints: Sequence[Endpoint], timeout_s: float) -> Connection:
            connection = connect(endpoints, timeout_s)
            if is_connected.is_set():
                return connection
            is_connected.set()
            return Stuck(connection, let_go)

        return stuck_first

    rig = make_rig("tcp", num_connections=2, tap=tap)
    begin(rig, "large")
    rig.sender.submit(Send("large", (4, 5), KvRange(0, 8, 0, 3)))
    assert is_connected.wait(PATIENCE_S)
    begin(rig, "small", (4, 5, 6))
    finish(rig, "small")
    assert rig.done().key == "small"
    let_go.set()
    rig.sender.submit(Finish("large", 8, (Sample(1),), time.monotonic()))
    done = rig.done()
    assert (done.key, done.error) == ("large", None)

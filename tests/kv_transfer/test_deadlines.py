"""No wait of a sender is without an end, and a ticket lives as long as its sender's engine shows
life."""

from __future__ import annotations

import socket
from collections import deque
from dataclasses import dataclass, field

import pytest

from baton.errors import HandoffFailed
from baton.types import KvLayout, Sample, WorkerIdentity
from baton.v1 import kv_pb2
from engine.kv.range import KvRange
from engine.kv.tensors.array import ArrayKvPool
from kv_transfer.frame import Frame
from kv_transfer.handshake import SenderConfig
from kv_transfer.send_connection import Begin, Cancel, Finish, Send, SendConnection
from kv_transfer.sender import SendDone, Sender
from kv_transfer.ticket import Endpoint, KvTicket, TicketAborted
from kv_transfer.transport.connection import Staged
from kv_transfer.transport.connector import make_connector
from tests.support.tickets import ticket_of

LAYOUT = KvLayout("m", 1, 1, 1, "int64", 4)
ACCEPT = kv_pb2.KvAccept(
    version=1,
    worker_id="d0",
    generation=7,
    num_credits=1,
    max_chunk_bytes=64,
    wire_dtype=LAYOUT.dtype,
)


@dataclass
class DeafConnection:
    """A peer that takes `num_credits` chunks and says only what the test lets it say."""

    num_credits: int = 0
    sent: list[Frame] = field(default_factory=list)
    replies: deque[Frame] = field(default_factory=deque)
    is_closed: bool = False

    def stage(self, num_bytes: int) -> Staged | None:
        if not self.num_credits:
            return None
        self.num_credits -= 1
        return Staged(0, memoryview(bytearray(num_bytes)))

    def unstage(self, staged: Staged) -> None:
        del staged
        self.num_credits += 1

    def send(self, frame: Frame, staged: Staged | None = None, *, more: bool = False) -> None:
        del staged, more
        self.sent.append(frame)

    def flush(self) -> None:
        pass

    def receive(self) -> Frame | None:
        return self.replies.popleft() if self.replies else None

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        self.is_closed = True


class Desk:
    """An inline sender under a clock of the test's, and its deaf peer."""

    def __init__(self) -> None:
        self.now = 100.0
        self.peer = DeafConnection()
        self.dones: list[SendDone] = []
        config = SenderConfig(
            WorkerIdentity("p0", 1),
            ArrayKvPool(LAYOUT, 4),
            lambda *_: self.peer,
            lambda: self.now,
            connect_timeout_s=5.0,
            ack_timeout_s=8.0,
        )
        self.sender = Sender(config, self.dones.append, is_inline=True)

    def begin(self, key: str, ticket_id: int) -> None:
        ticket = ticket_of(WorkerIdentity("d0", 7), LAYOUT, 16, ticket_id=ticket_id)
        self.sender.begin(key, ticket)

    def say(self, *frames: Frame) -> None:
        self.peer.replies.extend(frames)
        self.sender.heartbeat()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.sender.heartbeat()

    def error(self) -> str:
        (done,) = self.dones
        assert isinstance(done.error, HandoffFailed)
        return done.error.message


def test_a_peer_that_does_not_greet():
    desk = Desk()
    desk.begin("k", 1)
    desk.pass_time(4.9)
    assert not desk.dones
    desk.pass_time(0.2)
    assert "did not accept" in desk.error()
    assert desk.peer.is_closed


def test_a_peer_that_gives_no_credit_back():
    desk = Desk()
    desk.begin("k", 1)
    desk.say(ACCEPT)
    desk.sender.submit(Send("k", (0, 1), KvRange(0, 8, 0, 1)))
    desk.pass_time(7.9)
    desk.peer.num_credits = 1
    desk.say(kv_pb2.KvCredit(slots=[0]))
    assert isinstance(desk.peer.sent[-1], kv_pb2.KvChunk)
    desk.sender.submit(Send("k", (0, 1), KvRange(8, 8, 0, 1)))
    desk.pass_time(7.9)
    assert not desk.dones
    desk.pass_time(0.2)
    assert "took no KV" in desk.error()
    assert desk.peer.is_closed


def test_a_ticket_is_presented_before_chunks_that_wait_for_room():
    """Its owner does not wait long for it, and others' chunks are none of its business."""
    desk = Desk()
    desk.begin("k", 1)
    desk.say(ACCEPT)
    desk.sender.submit(Send("k", (0, 1), KvRange(0, 8, 0, 1)))
    desk.begin("other", 2)
    assert [type(frame) for frame in desk.peer.sent[1:]] == [kv_pb2.KvBegin] * 2


def test_what_is_urgent_does_not_wait_for_all_chunks():
    desk = Desk()
    desk.peer.num_credits = 1000
    peer, config = WorkerIdentity("d0", 7), desk.sender._config
    connection = SendConnection(peer, config, lambda: desk.now, desk.dones.append)
    ticket = KvTicket(WorkerIdentity("d0", 7), 1, 1, "k", b"", 0, 16, LAYOUT, (), lease_s=30.0)
    connection.handle(Begin("k", ticket, b"t"))
    desk.peer.replies.append(ACCEPT)
    for _ in range(100):
        connection.handle(Send("k", (0,), KvRange(0, 4, 0, 1)))
    assert connection.pump(), "there is more to do"
    connection.handle(Cancel("k", "CANCELLED", "enough"))
    while connection.pump():
        pass
    kinds = [type(frame) for frame in desk.peer.sent]
    assert 0 < kinds.count(kv_pb2.KvChunk) < 50
    assert kinds[-1] is kv_pb2.KvAbort


def test_a_peer_that_does_not_confirm_fails_that_handoff_alone():
    desk = Desk()
    desk.begin("k", 1)
    desk.begin("other", 2)
    desk.say(ACCEPT)
    desk.sender.submit(Finish("k", 0, (Sample(1),), desk.now - 0.25))
    commit = desk.peer.sent[-1]
    assert isinstance(commit, kv_pb2.KvCommit)
    assert commit.exposed_us == 250_000
    desk.pass_time(7.9)
    assert not desk.dones
    desk.pass_time(0.2)
    assert "did not confirm" in desk.error()
    abort = desk.peer.sent[-1]
    assert isinstance(abort, kv_pb2.KvAbort)
    assert abort.ticket_id == 1
    desk.say(kv_pb2.KvCommitted(ticket_id=1, epoch=1))
    assert len(desk.dones) == 1
    assert not desk.peer.is_closed


def test_leases_are_renewed_only_while_the_engine_shows_life():
    desk = Desk()
    desk.begin("k", 1)
    desk.say(ACCEPT)
    desk.pass_time(9.9)
    renew = kv_pb2.KvRenew(ticket_ids=[1])
    assert renew not in desk.peer.sent
    desk.pass_time(0.2)
    assert desk.peer.sent.count(renew) == 1
    desk.now += 10.1
    desk.begin("later", 2)
    assert desk.peer.sent.count(renew) == 1, "frames flow, but the engine loop stands still"
    desk.pass_time(10.1)
    assert kv_pb2.KvRenew(ticket_ids=[1, 2]) in desk.peer.sent


def test_a_key_that_is_used_again_gets_nothing_of_its_former_handoff():
    desk = Desk()
    desk.begin("k", 1)
    desk.sender.submit(Send("k", (0, 1), KvRange(0, 4, 0, 1)))
    desk.sender.submit(Finish("k", 4, (Sample(1),), desk.now))
    desk.sender.submit(Cancel("k", "CANCELLED", ""))
    desk.begin("k", 2)
    desk.peer.num_credits = 9
    desk.say(ACCEPT)
    kinds = [kv_pb2.KvHello, kv_pb2.KvBegin, kv_pb2.KvAbort, kv_pb2.KvBegin]
    assert [type(frame) for frame in desk.peer.sent] == kinds
    assert len(desk.dones) == 1
    desk.sender.submit(Send("k", (2, 3), KvRange(0, 4, 0, 1)))
    chunk = desk.peer.sent[-1]
    assert isinstance(chunk, kv_pb2.KvChunk)
    assert chunk.ticket_id == 2


@pytest.mark.parametrize("is_first", [True, False], ids=["alone", "behind another"])
def test_a_handoff_cancelled_before_its_begin_was_sent_is_aborted_at_the_receiver(is_first: bool):
    """Who reserved its blocks would wait for the lease to end."""
    desk = Desk()
    if not is_first:
        desk.begin("other", 2)
    desk.begin("k", 1)
    desk.sender.submit(Cancel("k", "CANCELLED", "enough"))
    assert len(desk.dones) == 1
    desk.say(ACCEPT)
    begin, abort = desk.peer.sent[-2:]
    assert isinstance(begin, kv_pb2.KvBegin)
    assert begin.ticket == ticket_of(WorkerIdentity("d0", 7), LAYOUT, 16, ticket_id=1)
    assert abort == kv_pb2.KvAbort(ticket_id=1, epoch=1, reason="CANCELLED", message="enough")
    num_sent = len(desk.peer.sent)
    desk.pass_time(100.0)
    assert abort not in desk.peer.sent[num_sent:]


def test_a_handoff_cancelled_before_its_connection_was_made_is_aborted_at_the_receiver():
    desk = Desk()
    peer, config = WorkerIdentity("d0", 7), desk.sender._config
    connection = SendConnection(peer, config, lambda: desk.now, desk.dones.append)
    ticket = KvTicket(peer, 1, 1, "k", b"", 0, 16, LAYOUT, (), lease_s=30.0)
    connection.handle(Begin("k", ticket, b"t"))
    connection.handle(Cancel("k", "CANCELLED", "enough"))
    assert connection.next_deadline() <= desk.now
    desk.peer.replies.append(ACCEPT)
    while connection.pump():
        pass
    abort = kv_pb2.KvAbort(ticket_id=1, epoch=1, reason="CANCELLED", message="enough")
    assert desk.peer.sent[1:] == [kv_pb2.KvBegin(ticket=b"t"), abort]
    assert connection.is_idle


def test_a_peer_that_does_not_greet_is_left_though_all_handoffs_were_cancelled():
    desk = Desk()
    desk.begin("k", 1)
    desk.sender.submit(Cancel("k", "CANCELLED", "enough"))
    desk.pass_time(4.9)
    assert not desk.peer.is_closed
    desk.pass_time(0.2)
    assert desk.peer.is_closed
    assert len(desk.dones) == 1
    num_sent = len(desk.peer.sent)
    desk.pass_time(10.0)
    assert len(desk.peer.sent) == num_sent, "nothing is left to say"


@pytest.mark.parametrize(
    "frame",
    [
        kv_pb2.KvHello(),
        ACCEPT,
        kv_pb2.KvRefuse(field="late"),
        kv_pb2.KvChunk(),
    ],
)
def test_a_peer_that_says_what_it_may_not_is_left(frame: Frame):
    desk = Desk()
    desk.begin("k", 1)
    desk.say(ACCEPT, frame)
    assert "now" in desk.error()
    assert desk.peer.is_closed


def test_a_confirmation_of_what_was_not_committed_is_ignored():
    desk = Desk()
    desk.begin("k", 1)
    desk.say(ACCEPT, kv_pb2.KvCommitted(ticket_id=1, epoch=1))
    assert not desk.dones


def test_a_silent_tcp_peer_ends_at_the_connect_deadline(make_rig):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        rig = make_rig("tcp", connect_timeout_s=0.05)
        endpoint = Endpoint("tcp", f"127.0.0.1:{silent.getsockname()[1]}")
        owner = WorkerIdentity("d0", 7)
        rig.sender.begin("k", ticket_of(owner, rig.source.layout, 3, endpoints=(endpoint,)))
        error = rig.done().error
        assert isinstance(error, HandoffFailed)
        assert "did not accept" in error.message


def test_the_lease_ends_a_ticket_whose_sender_is_silent(make_rig):
    now = [0.0]
    rig = make_rig("loopback", clock=lambda: now[0])
    waiting, silent = rig.offer((0,), 0, 3), rig.offer((1,), 0, 3)
    rig.sender.begin("k", silent.data)
    now[0] = 29.0
    rig.sender.heartbeat()
    rig.running.tickets.expire()
    assert rig.events.empty()
    now[0] = 31.0
    rig.running.tickets.expire()
    event = rig.event()
    assert isinstance(event, TicketAborted)
    assert event.ticket_id == waiting.ticket_id
    now[0] = 61.0
    rig.running.tickets.expire()
    assert rig.event().ticket_id == silent.ticket_id
    rig.sender.submit(Send("k", (0,), KvRange(0, 3, 0, 3)))
    error = rig.done().error
    assert isinstance(error, HandoffFailed)
    assert "sign of life" in error.message


def test_make_connector_is_a_connector():
    with pytest.raises(HandoffFailed, match="offers nothing"):
        make_connector()([], 1.0)

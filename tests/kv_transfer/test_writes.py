"""What goes onto a socket in one write."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from baton.types import Sample
from baton.v1 import kv_pb2
from engine.kv.range import KvRange
from kv_transfer.frame import PREAMBLE_BYTES, FrameBuffer, decode_header, decode_preamble
from kv_transfer.send_connection import Finish, Send
from kv_transfer.ticket import TicketCommitted
from kv_transfer.transport.connection import Staged
from kv_transfer.transport.stream import StreamConnection
from kv_transfer.transport.tcp_stream import TcpConnection

PATIENCE_S = 30.0
RENEW = kv_pb2.KvRenew(ticket_ids=[1])
CHUNK = kv_pb2.KvChunk(ticket_id=1, num_tokens=1, num_layers=1, payload_bytes=6)


@pytest.fixture
def pair() -> Iterator[tuple[TcpConnection, socket.socket]]:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    connection = TcpConnection(ours, 1.0)
    yield connection, theirs
    connection.close()
    theirs.close()


def test_a_frame_with_more_to_follow_goes_out_with_the_next(pair):
    connection, peer = pair
    connection.send(RENEW, more=True)
    with pytest.raises(BlockingIOError):
        peer.recv(1)
    connection.send(kv_pb2.KvCommit(ticket_id=1))
    frames = list(FrameBuffer().feed(peer.recv(4096)))
    assert frames == [RENEW, kv_pb2.KvCommit(ticket_id=1)]


def test_a_payload_goes_out_with_the_frame_that_follows(pair):
    connection, peer = pair
    pieces = (memoryview(b"abc"), memoryview(b"def"))
    staged = Staged(0, memoryview(bytearray(6)), can_gather=True, pieces=pieces)
    connection.send(CHUNK, staged, more=True)
    with pytest.raises(BlockingIOError):
        peer.recv(1)
    connection.send(kv_pb2.KvCommit(ticket_id=1))
    data = peer.recv(4096)
    preamble = decode_preamble(data[:PREAMBLE_BYTES], 6)
    end = PREAMBLE_BYTES + preamble.header_bytes
    assert decode_header(preamble, data[PREAMBLE_BYTES:end]) == CHUNK
    assert (preamble.payload_bytes, data[end : end + 6]) == (6, b"abcdef")
    assert list(FrameBuffer().feed(data[end + 6 :])) == [kv_pb2.KvCommit(ticket_id=1)]


def test_what_nothing_follows_is_flushed(pair):
    connection, peer = pair
    connection.send(RENEW, more=True)
    connection.flush()
    assert list(FrameBuffer().feed(peer.recv(4096))) == [RENEW]
    connection.flush()
    with pytest.raises(BlockingIOError):
        peer.recv(1)


def test_the_commit_rides_with_the_last_chunk(make_rig, monkeypatch):
    sent: list[tuple[str, bool]] = []
    send = StreamConnection.send
    all_submitted = threading.Event()

    def spy(self: StreamConnection, frame, staged=None, *, more=False) -> None:
        sent.append((type(frame).__name__, more))
        assert all_submitted.wait(PATIENCE_S)
        send(self, frame, staged, more=more)

    monkeypatch.setattr(StreamConnection, "send", spy)
    rig = make_rig("shm", sender_chunk_bytes=200, num_credits=64)
    rig.sender.begin("k", rig.offer((0, 1, 2), 0, 8).data)
    rig.send_all("k", (4, 5), 8)
    all_submitted.set()
    assert rig.done().error is None
    names = [name for name, _ in sent]
    assert names.count("KvChunk") > 1
    # Whether KvBegin waits for the first chunk depends on how soon the receiver accepts.
    assert [name for name, more in sent if more and name != "KvBegin"] == ["KvChunk"]
    at = sent.index(("KvChunk", True))
    assert sent[at + 1] == ("KvCommit", False)
    assert rig.event().first_tokens == (Sample(7),)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_small_handoff_is_one_write(make_rig, monkeypatch, transport):
    """Each write wakes the receiver."""
    writes: list[int] = []
    rig = make_rig(transport, sender_chunk_bytes=4096, receiver_chunk_bytes=4096)

    def hand_off(key: str, to: int, source: int) -> None:
        send = Send(key, (source,), KvRange(0, 3, 0, rig.source.layout.num_layers))
        rig.sender.begin(key, rig.offer((to,), 0, 3).data, send, Finish(key, 3, (), 0.0))

    hand_off("first", 0, 4)
    assert rig.done().error is None
    write = StreamConnection.write

    def spy(self: StreamConnection, *pieces) -> None:
        writes.append(len(pieces))
        write(self, *pieces)

    monkeypatch.setattr(StreamConnection, "write", spy)
    hand_off("second", 1, 5)
    assert rig.done().error is None
    assert len(writes) == 1
    assert all(isinstance(rig.event(), TicketCommitted) for _ in range(2))
    for token in range(3):
        sent, got = rig.token(rig.source, (5,), token), rig.token(rig.target, (1,), token)
        assert np.array_equal(sent, got)

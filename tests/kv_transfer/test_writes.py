"""What goes onto a socket in one write."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from baton.types import Sample
from baton.v1 import kv_pb2
from kv_transfer.frame import PREAMBLE_BYTES, FrameBuffer, decode_header, decode_preamble
from kv_transfer.transport.base import Staged
from kv_transfer.transport.stream_connection import StreamConnection
from kv_transfer.transport.tcp import TcpConnection

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


def test_a_payload_is_never_held_back(pair):
    connection, peer = pair
    pieces = (memoryview(b"abc"), memoryview(b"def"))
    staged = Staged(0, memoryview(bytearray(6)), can_gather=True, pieces=pieces)
    connection.send(CHUNK, staged, more=True)
    data = peer.recv(4096)
    preamble = decode_preamble(data[:PREAMBLE_BYTES], 6)
    end = PREAMBLE_BYTES + preamble.header_bytes
    assert decode_header(preamble, data[PREAMBLE_BYTES:end]) == CHUNK
    assert (preamble.payload_bytes, data[end:]) == (6, b"abcdef")


def test_held_frames_are_bounded(pair):
    connection, peer = pair
    frame = kv_pb2.KvRenew(ticket_ids=range(1, 1000))
    for _ in range(100):
        connection.send(frame, more=True)
    assert peer.recv(1)


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
    at = next(at for at, (_, more) in enumerate(sent) if more)
    assert sent[at : at + 2] == [("KvChunk", True), ("KvCommit", False)]
    assert not any(more for _, more in sent[at + 1 :])
    assert rig.event().firsts == (Sample(7),)

"""Workers of release 0.1.0 and of later ones hand sequences over to each other.

`tests/frozen/0.1.0` holds the wire as that release had it: the image of its protos, and the bytes
of one frame of each type. A peer that is built of these alone speaks here with today's code; where
it stands for a later release, it offers a version more, and its frames have fields more.
"""

from __future__ import annotations

import json
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory

from baton.errors import PeerMismatch
from baton.types import (
    KvLayout,
    Sample,
    Sampling,
    SequenceSpec,
    TokenLogprobs,
    WorkerIdentity,
)
from baton.v1 import kv_pb2
from engine.kv.range import KvRange
from engine.kv.tensors.array import ArrayKvPool
from kv_transfer.frame import PREAMBLE_BYTES, FrameError, decode_header, decode_preamble, encode
from kv_transfer.handshake import ReceiverConfig, SenderConfig, agreed_version
from kv_transfer.send_connection import Finish, Send
from kv_transfer.sender import SendDone, Sender
from kv_transfer.ticket import TicketCommitted, TicketEvent
from kv_transfer.transport.connector import make_connector
from kv_transfer.transport.listeners import RunningReceiver, open_receiver

FROZEN = Path(__file__).parents[1] / "frozen" / "0.1.0"
FRAMES: dict[str, str] = json.loads((FROZEN / "kv_frames.json").read_text())
PREAMBLE = struct.Struct("<4sBBHII")
NUMBERS = {name: number for number, name in enumerate(FRAMES, start=1)}
PLACE = struct.Struct("<QIIIII")
COMMIT = struct.Struct("<QIIQ")
LAYOUT = KvLayout("m", 2, 1, 2, "float32", 4)
PATIENCE_S = 30.0
FIRST = Sample(9, TokenLogprobs(9, -0.5, ((4, -1.5),)))
#: Field 1999, a varint: none of ours.
LATER_FIELD = bytes.fromhex("f87c01")


@pytest.fixture(scope="module")
def messages() -> dict[str, Any]:
    """The classes of the frozen messages, by name, apart from today's."""
    pool = descriptor_pool.DescriptorPool()
    image = descriptor_pb2.FileDescriptorSet.FromString((FROZEN / "protos.binpb").read_bytes())
    for file in image.file:
        pool.Add(file)
    return {
        message.name: message_factory.GetMessageClass(
            pool.FindMessageTypeByName(f"{file.package}.{message.name}")
        )
        for file in image.file
        for message in file.message_type
    }


@dataclass
class Peer:
    """Speaks the frozen wire and nothing else. is_later: of a release after it, which can do so."""

    sock: socket.socket
    messages: dict[str, Any]
    is_later: bool

    @property
    def max_version(self) -> int:
        return 2 if self.is_later else 1

    def send(self, message: Any, payload: bytes = b"") -> None:
        number = NUMBERS[type(message).__name__]
        header = message.SerializeToString() + (LATER_FIELD if self.is_later else b"")
        preamble = PREAMBLE.pack(b"BTKV", 1, number, 0, len(header), len(payload))
        self.sock.sendall(preamble + header + payload)

    def receive(self) -> tuple[Any, bytes]:
        """The next message and its payload, but for credits."""
        while True:
            preamble = self._read(PREAMBLE.size)
            magic, version, number, zero, num_header, num_payload = PREAMBLE.unpack(preamble)
            assert (magic, version, zero) == (b"BTKV", 1, 0)
            name = list(FRAMES)[number - 1]
            message = self.messages[name].FromString(self._read(num_header))
            payload = self._read(num_payload)
            if name != "KvCredit":
                return message, payload

    def expect(self, name: str) -> Any:
        message, _ = self.receive()
        assert type(message).__name__ == name, message
        return message

    def hello(self, min_version: int = 1) -> None:
        layout = self.messages["KvLayout"](
            fingerprint="m",
            num_layers=2,
            num_kv_heads=1,
            head_dim=2,
            dtype=LAYOUT.dtype,
            block_size=4,
        )
        self.send(
            self.messages["KvHello"](
                min_version=min_version,
                max_version=self.max_version,
                worker_id="p0",
                generation=3,
                layout=layout,
            )
        )

    def _read(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            data += self.sock.recv(num_bytes - len(data)) or pytest.fail("the connection ended")
        return data


def place_of(chunk: Any) -> int:
    """The checksum of a chunk's place, by the words of kv.proto."""
    place = (chunk.first_token, chunk.num_tokens, chunk.first_layer, chunk.num_layers)
    return xxhash.xxh3_64_intdigest(PLACE.pack(chunk.ticket_id, chunk.epoch, *place))


def digest_of(commit: Any) -> int:
    """A commit's own share of its checksum."""
    head = COMMIT.pack(commit.ticket_id, commit.epoch, commit.num_tokens, commit.exposed_us)
    ids = b"".join(first.token_id.to_bytes(4, "little") for first in commit.first_tokens)
    return xxhash.xxh3_64_intdigest(head + ids)


@pytest.mark.parametrize("name", FRAMES)
def test_todays_messages_read_and_write_the_frozen_frames(name, messages):
    raw = bytes.fromhex(FRAMES[name])
    preamble = decode_preamble(raw[:PREAMBLE_BYTES], 1 << 20)
    frame = decode_header(preamble, raw[PREAMBLE_BYTES:])
    assert type(frame).__name__ == name
    then = messages[name].FromString(raw[PREAMBLE_BYTES:])
    assert json_format.MessageToDict(frame) == json_format.MessageToDict(then)
    assert encode(frame, preamble.payload_bytes) == raw


def test_the_highest_version_that_both_know_is_taken(monkeypatch):
    assert [agreed_version(1, 1), agreed_version(1, 2)] == [1, 1]
    assert agreed_version(2, 9) is None
    assert agreed_version(0, 0) is None
    monkeypatch.setattr("kv_transfer.handshake.MAX_VERSION", 3)
    assert [agreed_version(1, 1), agreed_version(1, 2), agreed_version(2, 9)] == [1, 2, 3]


def test_frames_behind_the_handshake_have_the_version_that_was_agreed_on():
    renew = encode(kv_pb2.KvRenew(), version=2)
    assert renew[4] == 2
    assert decode_preamble(renew[:PREAMBLE_BYTES], 0, version=2)
    with pytest.raises(FrameError, match="version 2 where version 1"):
        decode_preamble(renew[:PREAMBLE_BYTES], 0, version=1)
    for frame in (kv_pb2.KvHello(), kv_pb2.KvAccept(), kv_pb2.KvRefuse()):
        assert encode(frame, version=2)[4] == 1


# A sender of another release.


@pytest.fixture
def events() -> queue.SimpleQueue[TicketEvent]:
    return queue.SimpleQueue()


@pytest.fixture
def running(events) -> Iterator[tuple[RunningReceiver, ArrayKvPool]]:
    pool = ArrayKvPool(LAYOUT, 4)
    identity = WorkerIdentity("d0", 7)
    running = open_receiver(
        ReceiverConfig(identity, pool), events.put, time.monotonic, transports=("tcp",)
    )
    yield running, pool
    running.close()


def connected(running: RunningReceiver, messages: dict[str, Any], is_later: bool) -> Peer:
    host, _, port = running.endpoints[0].address.rpartition(":")
    sock = socket.create_connection((host, int(port)), PATIENCE_S)
    return Peer(sock, messages, is_later)


@pytest.mark.parametrize("is_later", [False, True])
def test_a_sender_of_another_release_hands_over(running, events, messages, is_later):
    receiver, pool = running
    spec = SequenceSpec("r", tuple(range(6)), Sampling())
    offered = receiver.tickets.offer(spec, (3, 1), 0, 6)
    ticket = messages["KvTicket"].FromString(offered.data)
    assert ticket.layout.dtype == "float32"
    kv = np.random.default_rng(0).standard_normal((2, 2, 1, 6, 2)).astype(np.float32)
    peer = connected(receiver, messages, is_later)
    with peer.sock:
        peer.hello()
        accept = peer.expect("KvAccept")
        assert (accept.version, accept.worker_id, accept.wire_dtype) == (1, "d0", "float32")
        peer.send(messages["KvBegin"](ticket=offered.data))
        # Blocks of four tokens: four tokens, then two.
        payload = kv[:, :, :, :4].tobytes() + kv[:, :, :, 4:].tobytes()
        chunk = messages["KvChunk"](
            ticket_id=ticket.ticket_id,
            epoch=ticket.epoch,
            num_tokens=6,
            num_layers=2,
            payload_bytes=len(payload),
        )
        chunk.place_checksum = place_of(chunk)
        chunk.checksum = xxhash.xxh3_64_intdigest(payload, chunk.place_checksum)
        peer.send(chunk, payload)
        commit = messages["KvCommit"](ticket_id=ticket.ticket_id, epoch=ticket.epoch, num_tokens=6)
        first = commit.first_tokens.add(token_id=9)
        first.logprobs.chosen.token_id = 9
        first.logprobs.chosen.logprob = -0.5
        first.logprobs.top.add(token_id=4, logprob=-1.5)
        commit.checksum = (chunk.checksum + digest_of(commit)) % (1 << 64)
        peer.send(commit)
        assert peer.expect("KvCommitted").ticket_id == ticket.ticket_id
    event = events.get(timeout=PATIENCE_S)
    assert isinstance(event, TicketCommitted)
    assert event.first_tokens == (FIRST,)
    got = np.concatenate([pool.data[3], pool.data[1][:, :, :, :2]], axis=3)
    np.testing.assert_array_equal(got, kv)


def test_a_sender_that_speaks_no_version_of_ours_is_refused(running, events, messages):
    peer = connected(running[0], messages, is_later=True)
    with peer.sock:
        peer.hello(min_version=2)
        refusal = peer.expect("KvRefuse")
        named = (refusal.field, refusal.expected, refusal.actual)
        assert named == ("protocol_version", "1..1", "2..2")
    assert events.empty()


# A receiver of another release.

Serve = Callable[[Peer], object]


@pytest.fixture
def serve_once(messages) -> Iterator[Callable[..., tuple[str, queue.SimpleQueue[Any]]]]:
    """Starts a worker d0 of another release that takes one connection; its address, and a queue
    that gets what `serve` returns."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        threads: list[threading.Thread] = []

        def start(serve: Serve, *, is_later: bool = False) -> tuple[str, queue.SimpleQueue[Any]]:
            results: queue.SimpleQueue[Any] = queue.SimpleQueue()

            def run() -> None:
                sock, _ = server.accept()
                with sock:
                    results.put(serve(Peer(sock, messages, is_later)))

            threads.append(threading.Thread(target=run))
            threads[-1].start()
            host, port = server.getsockname()
            return f"{host}:{port}", results

        yield start
        for thread in threads:
            thread.join()


def ticket_for(address: str) -> bytes:
    ticket = kv_pb2.KvTicket(
        worker_id="d0",
        generation=7,
        ticket_id=5,
        epoch=1,
        num_tokens=6,
        lease_ms=9000,
        mac=bytes(32),
    )
    ticket.layout.CopyFrom(
        kv_pb2.KvLayout(
            fingerprint="m", num_layers=2, num_kv_heads=1, head_dim=2, dtype="float32", block_size=3
        )
    )
    ticket.endpoints.add(transport=kv_pb2.KV_TRANSPORT_TCP, address=address)
    return ticket.SerializeToString()


def accept(peer: Peer, version: int, **others: Any) -> Any:
    """Take the sender's greeting; what it was."""
    hello = peer.expect("KvHello")
    peer.send(
        peer.messages["KvAccept"](
            version=version,
            worker_id="d0",
            generation=7,
            num_credits=4,
            max_chunk_bytes=4096,
            wire_dtype="float32",
            **others,
        )
    )
    return hello


@pytest.fixture
def sender() -> Iterator[tuple[Sender, ArrayKvPool, queue.SimpleQueue[SendDone]]]:
    pool = ArrayKvPool(LAYOUT, 4)
    pool.data[...] = np.random.default_rng(1).standard_normal(pool.data.shape)
    dones: queue.SimpleQueue[SendDone] = queue.SimpleQueue()
    identity = WorkerIdentity("p0", 3)
    config = SenderConfig(identity, pool, make_connector("tcp"), time.monotonic)
    sender = Sender(config, dones.put)
    yield sender, pool, dones
    sender.close()


@pytest.mark.parametrize("is_later", [False, True])
def test_a_receiver_of_another_release_is_handed_to(serve_once, sender, is_later):
    def serve(peer: Peer) -> tuple[Any, Any, bytes, Any]:
        hello = accept(peer, version=1)
        peer.expect("KvBegin")
        chunk, payload = peer.receive()
        commit = peer.expect("KvCommit")
        peer.send(peer.messages["KvCommitted"](ticket_id=5, epoch=1))
        return hello, chunk, payload, commit

    address, results = serve_once(serve, is_later=is_later)
    sending, pool, dones = sender
    sending.begin("k", ticket_for(address))
    sending.submit(Send("k", (2, 0), KvRange(0, 6, 0, 2)))
    sending.submit(Finish("k", 6, (FIRST,), time.monotonic()))
    assert dones.get(timeout=PATIENCE_S).error is None
    hello, chunk, payload, commit = results.get(timeout=PATIENCE_S)
    assert (hello.min_version, hello.layout.dtype) == (1, "float32")
    assert payload == pool.data[2].tobytes() + pool.data[0][:, :, :, :2].tobytes()
    assert chunk.place_checksum == place_of(chunk)
    assert chunk.checksum == xxhash.xxh3_64_intdigest(payload, chunk.place_checksum)
    assert commit.checksum == (chunk.checksum + digest_of(commit)) % (1 << 64)
    (first,) = commit.first_tokens
    assert (commit.num_tokens, first.token_id, first.logprobs.chosen.logprob) == (6, 9, -0.5)
    assert [(top.token_id, top.logprob) for top in first.logprobs.top] == [(4, -1.5)]


def test_a_receiver_that_takes_no_version_of_ours_is_named(serve_once, sender):
    address, _ = serve_once(lambda peer: accept(peer, version=9))
    sending, _, dones = sender
    sending.begin("k", ticket_for(address))
    error = dones.get(timeout=PATIENCE_S).error
    assert isinstance(error, PeerMismatch)
    assert error.metadata["field"] == "protocol_version"


def test_plain_checksums_are_for_shared_memory_only(serve_once, sender):
    """Else who is on the wire could ask for them."""
    kind = kv_pb2.KV_PAYLOAD_CHECKSUM_XXH3
    address, _ = serve_once(lambda peer: accept(peer, version=1, payload_checksum=kind))
    sending, _, dones = sender
    sending.begin("k", ticket_for(address))
    error = dones.get(timeout=PATIENCE_S).error
    assert isinstance(error, FrameError)
    assert "checksums" in error.message

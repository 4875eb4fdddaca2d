"""Workers of this version and of the one before hand sequences over to each other.

`frozen/` holds version 1 as it was: its messages, and the bytes of one frame of each type.
"""

from __future__ import annotations

import json
import queue
import socket
import struct
import subprocess
import sys
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

from baton.engine.array_kv_pool import ArrayKvPool
from baton.errors import HandoffFailed, PeerMismatch
from baton.types import (
    KvLayout,
    KvRange,
    Sample,
    Sampling,
    SequenceSpec,
    TokenLogprobs,
    WorkerIdentity,
)
from baton.v1 import kv_pb2
from kv_transfer.frame import PREAMBLE_BYTES, FrameError, decode_header, decode_preamble, encode
from kv_transfer.running_receiver import RunningReceiver, open_receiver
from kv_transfer.sender import SendDone, Sender
from kv_transfer.ticket import TicketCommitted, TicketEvent
from kv_transfer.transport.connector import make_connector
from kv_transfer.version import agreed_version

FROZEN = Path(__file__).parent / "frozen"
FRAMES: dict[str, str] = json.loads((FROZEN / "kv_v1_frames.json").read_text())
V1_PREAMBLE = struct.Struct("<4sBBHII")
V1_NUMBERS = {name: number for number, name in enumerate(FRAMES, start=1)}
LAYOUT = KvLayout("m", 2, 1, 2, "float32", 4)
PATIENCE_S = 30.0
FIRST = Sample(9, TokenLogprobs(9, -0.5, ((4, -1.5),)))


@pytest.fixture(scope="module")
def v1(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The message classes of version 1, by name, apart from today's."""
    out = tmp_path_factory.mktemp("v1") / "kv_v1.binpb"
    source = f"--proto_path={FROZEN}"
    # In a process of its own: the compiler and nixl's library cannot be loaded into one.
    command = [sys.executable, "-m", "grpc_tools.protoc", source, f"--descriptor_set_out={out}"]
    subprocess.run([*command, "kv_v1.proto"], check=True)
    pool = descriptor_pool.DescriptorPool()
    (file,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    pool.Add(file)
    return {
        message.name: message_factory.GetMessageClass(
            pool.FindMessageTypeByName(f"{file.package}.{message.name}")
        )
        for message in file.message_type
    }


@dataclass
class V1Socket:
    """Speaks version 1 and nothing else."""

    sock: socket.socket
    messages: dict[str, Any]

    def send(self, message: Any, payload: bytes = b"") -> None:
        number = V1_NUMBERS[type(message).__name__]
        header = message.SerializeToString()
        preamble = V1_PREAMBLE.pack(b"BTKV", 1, number, 0, len(header), len(payload))
        self.sock.sendall(preamble + header + payload)

    def receive(self) -> tuple[Any, bytes]:
        """The next message and its payload, but for credits."""
        while True:
            magic, version, number, zero, num_header, num_payload = V1_PREAMBLE.unpack(
                self._read(V1_PREAMBLE.size)
            )
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

    def layout(self, dtype: str = LAYOUT.dtype) -> Any:
        return self.messages["KvLayout"](
            fingerprint="m", num_layers=2, num_kv_heads=1, head_dim=2, dtype=dtype, block_size=4
        )

    def hello(self, dtype: str = LAYOUT.dtype) -> None:
        self.send(
            self.messages["KvHello"](
                min_version=1,
                max_version=1,
                worker_id="p0",
                generation=3,
                layout=self.layout(dtype),
            )
        )

    def _read(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            data += self.sock.recv(num_bytes - len(data)) or pytest.fail("the connection ended")
        return data


@pytest.mark.parametrize("name", FRAMES)
def test_todays_messages_read_and_write_the_frames_of_version_1(name, v1):
    raw = bytes.fromhex(FRAMES[name])
    preamble = decode_preamble(raw[:PREAMBLE_BYTES], 1 << 20)
    frame = decode_header(preamble, raw[PREAMBLE_BYTES:])
    assert type(frame).__name__ == name
    then = v1[name].FromString(raw[PREAMBLE_BYTES:])
    assert json_format.MessageToDict(frame) == json_format.MessageToDict(then)
    assert encode(frame, preamble.payload_bytes) == raw


def test_the_highest_version_that_both_know_is_taken():
    assert [agreed_version(1, 1), agreed_version(1, 2), agreed_version(2, 9)] == [1, 2, 2]
    assert agreed_version(3, 9) is None
    assert agreed_version(0, 0) is None


def test_after_the_handshake_frames_tell_the_version_that_was_agreed_on():
    chunk = encode(kv_pb2.KvRenew(), version=2)
    assert chunk[4] == 2
    assert decode_preamble(chunk[:PREAMBLE_BYTES], 0, version=2)
    with pytest.raises(FrameError, match="version 2 where version 1"):
        decode_preamble(chunk[:PREAMBLE_BYTES], 0, version=1)
    for frame in (kv_pb2.KvHello(), kv_pb2.KvAccept(), kv_pb2.KvRefuse()):
        assert encode(frame, version=2)[4] == 1


# A sender of version 1.


@pytest.fixture
def events() -> queue.SimpleQueue[TicketEvent]:
    return queue.SimpleQueue()


OpenReceiver = Callable[..., RunningReceiver]


@pytest.fixture
def receive(events) -> Iterator[OpenReceiver]:
    opened: list[RunningReceiver] = []

    def make(pool: ArrayKvPool, wire_dtype: str = "auto") -> RunningReceiver:
        opened.append(
            open_receiver(
                WorkerIdentity("d0", 7),
                pool,
                events.put,
                time.monotonic,
                transports=("tcp",),
                wire_dtype=wire_dtype,
            )
        )
        return opened[-1]

    yield make
    for running in opened:
        running.close()


def connected(running: RunningReceiver, messages: dict[str, Any]) -> V1Socket:
    host, _, port = running.endpoints[0].address.rpartition(":")
    sock = socket.create_connection((host, int(port)), PATIENCE_S)
    return V1Socket(sock, messages)


@pytest.mark.parametrize("wanted", ["auto", "int8"])
def test_a_sender_of_version_1_hands_over(receive, events, v1, wanted):
    pool = ArrayKvPool(LAYOUT, 4)
    running = receive(pool, wanted)
    spec = SequenceSpec("r", tuple(range(6)), Sampling())
    offered = running.tickets.offer(spec, (3, 1), 0, 6)
    # A ticket is made today, and read by the sender of then.
    ticket = v1["KvTicket"].FromString(offered.data)
    assert ticket.layout.dtype == "float32"
    kv = np.random.default_rng(0).standard_normal((2, 2, 1, 6, 2)).astype(np.float32)
    peer = connected(running, v1)
    with peer.sock:
        peer.hello()
        accept = peer.expect("KvAccept")
        assert (accept.version, accept.worker_id) == (1, "d0")
        peer.send(v1["KvBegin"](ticket=offered.data))
        # Blocks of four tokens: four tokens, then two.
        payload = kv[:, :, :, :4].tobytes() + kv[:, :, :, 4:].tobytes()
        checksum = xxhash.xxh3_64_intdigest(payload)
        header = v1["KvChunk"](
            ticket_id=ticket.ticket_id,
            epoch=ticket.epoch,
            num_tokens=6,
            num_layers=2,
            checksum=checksum,
            payload_bytes=len(payload),
        )
        peer.send(header, payload)
        commit = v1["KvCommit"](
            ticket_id=ticket.ticket_id,
            epoch=ticket.epoch,
            num_tokens=6,
            first_token_id=9,
            checksum=checksum,
        )
        commit.logprobs.chosen.token_id = 9
        commit.logprobs.chosen.logprob = -0.5
        commit.logprobs.top.add(token_id=4, logprob=-1.5)
        peer.send(commit)
        assert peer.expect("KvCommitted").ticket_id == ticket.ticket_id
    event = events.get(timeout=PATIENCE_S)
    assert isinstance(event, TicketCommitted)
    assert event.firsts == (FIRST,)
    got = np.concatenate([pool.data[3], pool.data[1][:, :, :, :2]], axis=3)
    np.testing.assert_array_equal(got, kv)


def test_a_sender_of_version_1_with_another_type_is_refused_as_then(receive, events, v1):
    peer = connected(receive(ArrayKvPool(LAYOUT, 4)), v1)
    with peer.sock:
        peer.hello("bfloat16")
        refusal = peer.expect("KvRefuse")
        assert (refusal.field, refusal.expected, refusal.actual) == ("dtype", "float32", "bfloat16")
    assert events.empty()


# A receiver of version 1.


@dataclass
class V1Receiver:
    """Takes one connection and does what `serve` says."""

    address: str
    heard: queue.SimpleQueue[Any]
    thread: threading.Thread


@pytest.fixture
def v1_receiver(v1) -> Iterator[Callable[[Callable[[V1Socket], object]], V1Receiver]]:
    """A worker d0 of version 1; what `serve` returns is heard."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        threads: list[threading.Thread] = []

        def start(serve: Callable[[V1Socket], object]) -> V1Receiver:
            heard: queue.SimpleQueue[Any] = queue.SimpleQueue()

            def run() -> None:
                sock, _ = server.accept()
                with sock:
                    heard.put(serve(V1Socket(sock, v1)))

            thread = threading.Thread(target=run)
            threads.append(thread)
            thread.start()
            host, port = server.getsockname()
            return V1Receiver(f"{host}:{port}", heard, thread)

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


def accepted(peer: V1Socket) -> None:
    hello = peer.expect("KvHello")
    assert (hello.min_version, hello.layout.dtype) == (1, "float32")
    peer.send(
        peer.messages["KvAccept"](
            version=1, worker_id="d0", generation=7, num_credits=4, max_chunk_bytes=4096
        )
    )
    peer.expect("KvBegin")


@pytest.fixture
def sender() -> Iterator[tuple[Sender, ArrayKvPool, queue.SimpleQueue[SendDone]]]:
    pool = ArrayKvPool(LAYOUT, 4)
    pool.data[...] = np.random.default_rng(1).standard_normal(pool.data.shape)
    dones: queue.SimpleQueue[SendDone] = queue.SimpleQueue()
    identity = WorkerIdentity("p0", 3)
    sender = Sender(identity, LAYOUT, pool, make_connector("tcp"), dones.put, time.monotonic)
    yield sender, pool, dones
    sender.close()


def test_a_receiver_of_version_1_is_handed_to(v1_receiver, sender):
    def serve(peer: V1Socket) -> tuple[Any, bytes, Any]:
        accepted(peer)
        chunk, payload = peer.receive()
        commit = peer.expect("KvCommit")
        peer.send(peer.messages["KvCommitted"](ticket_id=5, epoch=1))
        return chunk, payload, commit

    receiver = v1_receiver(serve)
    sending, pool, dones = sender
    sending.begin("k", ticket_for(receiver.address))
    sending.send("k", (2, 0), KvRange(0, 6, 0, 2))
    sending.commit("k", 6, (FIRST,), time.monotonic())
    assert dones.get(timeout=PATIENCE_S).error is None
    chunk, payload, commit = receiver.heard.get(timeout=PATIENCE_S)
    assert payload == pool.data[2].tobytes() + pool.data[0][:, :, :, :2].tobytes()
    assert chunk.checksum == commit.checksum == xxhash.xxh3_64_intdigest(payload)
    assert (commit.num_tokens, commit.first_token_id) == (6, 9)
    assert commit.logprobs.chosen.logprob == -0.5
    assert [(top.token_id, top.logprob) for top in commit.logprobs.top] == [(4, -1.5)]


@pytest.mark.parametrize("firsts", [(), (Sample(1), Sample(2))])
def test_what_version_1_cannot_say_fails_that_handoff_alone(v1_receiver, sender, firsts):
    def serve(peer: V1Socket) -> Any:
        accepted(peer)
        peer.receive()
        return peer.expect("KvAbort")

    receiver = v1_receiver(serve)
    sending, _, dones = sender
    sending.begin("k", ticket_for(receiver.address))
    sending.send("k", (2, 0), KvRange(0, 6, 0, 2))
    sending.commit("k", 6, firsts, time.monotonic())
    error = dones.get(timeout=PATIENCE_S).error
    assert isinstance(error, HandoffFailed)
    assert "version 1" in error.message
    assert receiver.heard.get(timeout=PATIENCE_S).ticket_id == 5


def test_a_receiver_that_takes_no_version_of_ours_is_named(v1_receiver, sender):
    def serve(peer: V1Socket) -> None:
        peer.expect("KvHello")
        accept = peer.messages["KvAccept"](
            version=9, worker_id="d0", generation=7, num_credits=4, max_chunk_bytes=4096
        )
        peer.send(accept)

    sending, _, dones = sender
    sending.begin("k", ticket_for(v1_receiver(serve).address))
    error = dones.get(timeout=PATIENCE_S).error
    assert isinstance(error, PeerMismatch)
    assert error.metadata["field"] == "protocol_version"

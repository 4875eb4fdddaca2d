"""Particulars of nixl: payloads land before they are read, and memory outlives peers that may still
write to it."""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from baton.errors import ConfigError, HandoffFailed
from baton.kv_transports import kv_transport
from baton.types import KvLayout, Sample, WorkerIdentity
from baton.v1 import kv_pb2
from baton.wire import layout_to_proto
from engine.kv.range import KvRange
from engine.kv.tensors.array import ArrayKvPool
from kv_transfer.frame import PREAMBLE_BYTES, decode_header, decode_preamble, encode
from kv_transfer.handshake import SenderConfig
from kv_transfer.send_connection import Finish, Send
from kv_transfer.sender import SendDone, Sender
from kv_transfer.ticket import TicketAborted
from kv_transfer.transport.base import TransportConfig
from kv_transfer.transport.connection import TransportError
from kv_transfer.transport.connector import make_connector
from kv_transfer.transport.nixl import QUARANTINE_S, TRANSPORT, NixlConnection, Quarantine

pytestmark = pytest.mark.slow

needs_nixl = pytest.mark.skipif(
    not kv_transport("nixl").is_installed, reason="the nixl library is not installed"
)
LAYOUT = KvLayout("m", 3, 2, 4, "int64", 4)
PATIENCE_S = 30.0

_RECEIVER = """
import sys, time
from engine.kv.tensors.array import ArrayKvPool
from baton.types import KvLayout, Sampling, SequenceSpec, WorkerIdentity
from kv_transfer.handshake import ReceiverConfig
from kv_transfer.transport.listeners import open_receiver

layout = KvLayout("m", 3, 2, 4, "int64", 4)
running = open_receiver(
    ReceiverConfig(WorkerIdentity("d9", 1), ArrayKvPool(layout, 8)),
    print,
    time.monotonic,
    transports=("nixl",),
)
for blocks in ((0, 1), (2, 3)):
    spec = SequenceSpec("r", tuple(range(6)), Sampling())
    print("ticket", running.tickets.offer(spec, blocks, 0, 6).data.hex(), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def other_process() -> Iterator[tuple[subprocess.Popen[str], list[bytes]]]:
    """A receiver in a process of its own, and tickets of it."""
    with subprocess.Popen(
        [sys.executable, "-c", _RECEIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        tickets: list[bytes] = []
        while len(tickets) < 2:
            line = process.stdout.readline()
            assert line, "the receiver has ended"
            if line.startswith("ticket "):
                tickets.append(bytes.fromhex(line.split()[1]))
        try:
            yield process, tickets
        finally:
            process.kill()


@needs_nixl
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_receiver_that_dies_or_freezes_ends_the_handoff(end):
    dones: queue.SimpleQueue[SendDone] = queue.SimpleQueue()
    pool = ArrayKvPool(LAYOUT, 4)
    connect = make_connector("nixl", send_timeout_s=0.3)
    identity = WorkerIdentity("p0", 1)
    sender = Sender(SenderConfig(identity, pool, connect, time.monotonic), dones.put)
    with other_process() as (process, (whole, cut)):
        sender.begin("whole", whole)
        sender.submit(Send("whole", (0, 1), KvRange(0, 6, 0, 3)))
        sender.submit(Finish("whole", 6, (Sample(1),), time.monotonic()))
        assert dones.get(timeout=PATIENCE_S).error is None
        os.kill(process.pid, end)
        sender.begin("cut", cut)
        sender.submit(Send("cut", (0, 1), KvRange(0, 6, 0, 3)))
        sender.submit(Finish("cut", 6, (Sample(1),), time.monotonic()))
        assert isinstance(dones.get(timeout=PATIENCE_S).error, HandoffFailed)
        sender.close()


@needs_nixl
def test_the_library_is_loaded_before_a_receiver_waits_for_us():
    """It takes a second or more, and a receiver waits a second for a greeting: of a port that takes
    no connections it is loaded all the same."""
    code = """
import sys
from baton.errors import HandoffFailed
from kv_transfer.ticket import Endpoint
from kv_transfer.transport.connector import make_connector
try:
    make_connector("nixl")([Endpoint("nixl", "127.0.0.1:1")], 1.0)
except HandoffFailed as error:
    print(error, "nixl._api" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "refused" in done.stdout
    assert done.stdout.split()[-1] == "True"


@needs_nixl
def test_an_acceptance_is_taken_before_an_agent_is_made():
    """So that it is answered in time."""
    ours, theirs = socket.socketpair()
    connection = NixlConnection(ours, "sender/test", 1.0, Quarantine())
    accept = kv_pb2.KvAccept(num_credits=1, max_chunk_bytes=4096)
    accept.remote_memory.agent = b"unlike any agent's"
    connection.open_staging(accept)
    with pytest.raises(TransportError, match="the receiver's memory cannot be used"):
        connection.stage(8)
    connection.close()
    theirs.close()


@needs_nixl
def test_a_chunk_that_has_not_landed_is_not_read(make_rig):
    rig = make_rig("nixl", source_layout=LAYOUT, target_layout=LAYOUT)
    ticket = rig.offer((0, 1), 0, 6)
    host, _, port = rig.running.endpoints[0].address.rpartition(":")
    with socket.create_connection((host, int(port)), PATIENCE_S) as sock:

        def receive() -> object:
            preamble = decode_preamble(sock.recv(PREAMBLE_BYTES, socket.MSG_WAITALL), 0)
            header = sock.recv(preamble.header_bytes, socket.MSG_WAITALL)
            return decode_header(preamble, header)

        hello = kv_pb2.KvHello(
            min_version=1, max_version=1, worker_id="p0", layout=layout_to_proto(LAYOUT)
        )
        sock.sendall(encode(hello))
        accept = receive()
        assert isinstance(accept, kv_pb2.KvAccept)
        assert accept.remote_memory.agent
        sock.sendall(encode(kv_pb2.KvBegin(ticket=ticket.data)))
        chunk = kv_pb2.KvChunk(
            ticket_id=ticket.ticket_id, epoch=1, num_tokens=4, num_layers=1, payload_bytes=512
        )
        sock.sendall(encode(chunk))
        sock.sendall(encode(kv_pb2.KvCommit(ticket_id=ticket.ticket_id)))
        assert sock.recv(1) == b""
    event = rig.event()
    assert isinstance(event, TicketAborted)
    assert "slot 0 was to land" in event.message
    assert not rig.target.data.any()


def test_memory_is_kept_until_its_time_is_over():
    now = 0.0
    quarantine = Quarantine(lambda: now)
    memories = [mmap.mmap(-1, mmap.PAGESIZE) for _ in range(3)]
    kept = quarantine._kept
    quarantine.keep(memories[0])
    now = QUARANTINE_S - 1
    quarantine.keep(memories[1])
    assert [memory for _, memory in kept] == memories[:2]
    now = QUARANTINE_S
    quarantine.keep(memories[2])
    assert [memory for _, memory in kept] == memories[1:]


def test_without_the_library_the_option_is_refused_by_name(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="not installed"):
        TRANSPORT.listen(TransportConfig())

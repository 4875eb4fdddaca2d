"""Never another request's KV: the ways in which servers have answered with the KV of another
prompt, with status 200, each tried on every transport between workers.

The first five are those of https://github.com/vllm-project/vllm/issues/52234 (a decode engine that
is given an unknown request, places out of range, a used reference, one with blocks given away, one
after its lease); then memory that is given away under a writer or a reader
(https://github.com/sgl-project/sglang/issues/24527), workers that die or freeze between a payload
and its header, and addresses, names and tickets that two have. docs/reliability.md has the table.

In each somebody tries to write into, or instead of, what belongs to a second request; that one is
then right, bit for bit, and what is wrong is refused by name.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from baton.errors import HandoffFailed
from baton.kv_transports import kv_transport
from baton.types import Sample, Sampling, SequenceSpec, WorkerIdentity
from baton.v1 import kv_pb2
from engine.kv.range import KvRange
from engine.kv.tensors.array import ArrayKvPool
from kv_transfer import receiver
from kv_transfer.device_memory import device_memory_of
from kv_transfer.frame import place_checksum
from kv_transfer.handshake import ReceiverConfig, SenderConfig
from kv_transfer.send_connection import Cancel, Finish, Send, SendDone
from kv_transfer.sender import Sender
from kv_transfer.ticket import (
    OfferedTicket,
    TicketAborted,
    TicketCommitted,
    TicketState,
    common_fields,
    parse_ticket,
    signed_ticket,
    ticket_message,
)
from kv_transfer.ticket_table import TicketRules
from kv_transfer.transport.base import TransportConfig
from kv_transfer.transport.connection import Connector
from kv_transfer.transport.connector import make_connector
from kv_transfer.transport.listeners import open_receiver
from tests.support.kv_transports import REMOTE

pytestmark = pytest.mark.parametrize("transport", REMOTE)

PATIENCE_S = 30.0
NUM_TOKENS = 6
#: A prompt's blocks: in a sender's pool, of 4 tokens each, and in the receiver's, of 3.
MINE, OTHERS = (1, 2), (5, 6)
HERE, ELSEWHERE = (0, 1), (8, 9)
WHOLE = KvRange(0, NUM_TOKENS, 0, 3)
FIRST_HALF, SECOND_HALF = KvRange(0, 3, 0, 3), KvRange(3, 3, 0, 3)
ENDLESS = 1e6

OnChunk = Callable[[kv_pb2.KvChunk], None]


class TappedConnection:
    """A connection that shows each chunk's header when its payload is packed, before either
    leaves."""

    def __init__(self, inner: Any, on_chunk: OnChunk) -> None:
        self._inner = inner
        self._on_chunk = on_chunk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send(self, frame: Any, staged: Any = None, *, more: bool = False) -> None:
        if isinstance(frame, kv_pb2.KvChunk):
            self._on_chunk(frame)
        self._inner.send(frame, staged, more=more)


def tapped(connect: Connector, on_chunk: OnChunk) -> Connector:
    return lambda endpoints, timeout_s: TappedConnection(connect(endpoints, timeout_s), on_chunk)


@dataclass
class PrefillWorker:
    """A sender, its KV (the same as that of any other but for `seed`), and its handoffs' ends."""

    sender: Sender
    pool: ArrayKvPool
    dones: queue.SimpleQueue[SendDone]

    def send(self, ticket: bytes, blocks: tuple[int, ...], *pieces: KvRange, key: str = "k") -> str:
        """Begin, and send these; `key` may be used for `finish`."""
        self.sender.begin(key, ticket)
        for piece in pieces:
            self.sender.submit(Send(key, blocks, piece))
        return key

    def finish(self, key: str) -> SendDone:
        self.sender.submit(Finish(key, NUM_TOKENS, (Sample(7),), 0.0))
        return self.dones.get(timeout=PATIENCE_S)

    def hand_off(self, ticket: bytes, blocks: tuple[int, ...]) -> SendDone:
        return self.finish(self.send(ticket, blocks, WHOLE))


class Workers:
    """A decode worker d0, at `rig`, and as many prefill workers as a test asks for. `now` moves by
    hand."""

    def __init__(self, rig: Any, now: list[float], transport: str) -> None:
        self.rig = rig
        self.now = now
        self.transport = transport
        self.senders: list[Sender] = []

    def prefill(
        self,
        name: str = "p1",
        seed: int = 1,
        on_chunk: OnChunk = lambda _: None,
        on_done: Callable[[PrefillWorker], None] = lambda _: None,
        generation: int = 3,
    ) -> PrefillWorker:
        pool = type(self.rig.source)(self.rig.source.layout, 16)
        fill(pool, seed)
        dones: queue.SimpleQueue[SendDone] = queue.SimpleQueue()

        def done(end: SendDone) -> None:
            on_done(worker)
            dones.put(end)

        memory = device_memory_of(pool)
        connect = tapped(make_connector(self.transport, memory=memory), on_chunk)
        identity = WorkerIdentity(name, generation)
        times = (ENDLESS, ENDLESS, ENDLESS)
        config = SenderConfig(identity, pool, connect, lambda: self.now[0], *times, 400)
        sender = Sender(config, done)
        self.senders.append(sender)
        worker = PrefillWorker(sender, pool, dones)
        return worker

    def offer(self, blocks: tuple[int, ...] = HERE) -> OfferedTicket:
        offered: OfferedTicket = self.rig.offer(blocks, 0, NUM_TOKENS)
        return offered

    def let_the_lease_end(self) -> None:
        self.now[0] += 100.0
        self.rig.running.tickets.expire()

    def aborted(self, ticket: OfferedTicket) -> TicketAborted:
        event = self.rig.event()
        assert isinstance(event, TicketAborted)
        assert event.ticket_id == ticket.ticket_id
        return event

    def serve_another(self, blocks: tuple[int, ...] = HERE) -> PrefillWorker:
        """The blocks go to another request, with KV from a worker of its own."""
        victim = self.prefill("p2", seed=2)
        ticket = self.offer(blocks)
        assert victim.hand_off(ticket.data, OTHERS).error is None
        event = self.rig.event()
        assert isinstance(event, TicketCommitted)
        assert event.ticket_id == ticket.ticket_id
        self.assert_holds(blocks, victim, OTHERS)
        return victim

    def assert_holds(
        self, blocks: tuple[int, ...], worker: PrefillWorker, source_blocks: tuple[int, ...]
    ) -> None:
        assert_holds(self.rig.target, blocks, worker.pool, source_blocks)

    def assert_no_event(self) -> None:
        assert self.rig.events.empty()

    def until(self, ticket: OfferedTicket, state: TicketState) -> None:
        while self.rig.running.tickets.state(ticket.ticket_id) is not state:
            assert self.rig.events.empty()
            time.sleep(0.001)  # asking without a pause keeps the table's lock from its threads


def fill(pool: ArrayKvPool, seed: int) -> None:
    pool.data[...] = np.random.default_rng(seed).integers(1, 1 << 50, pool.data.shape)


def tokens_of(pool: ArrayKvPool, blocks: tuple[int, ...]) -> list[np.ndarray]:
    size = pool.layout.block_size
    return [pool.data[blocks[token // size], :, :, :, token % size] for token in range(NUM_TOKENS)]


def assert_holds(
    pool: ArrayKvPool,
    blocks: tuple[int, ...],
    source: ArrayKvPool,
    source_blocks: tuple[int, ...],
) -> None:
    """Blocks have the KV that a prefill worker has in its own."""
    np.testing.assert_array_equal(tokens_of(pool, blocks), tokens_of(source, source_blocks))


@pytest.fixture
def workers(make_rig: Any, transport: str) -> Iterator[Workers]:
    now = [0.0]
    rig = make_rig(transport, clock=lambda: now[0], connect_timeout_s=ENDLESS)
    found = Workers(rig, now, transport)
    yield found
    for sender in found.senders:
        sender.close()


def assert_refused(done: SendDone) -> None:
    assert isinstance(done.error, HandoffFailed)


# The five of vllm#52234.


def test_a_ticket_that_nobody_offered(workers: Workers) -> None:
    theirs = workers.offer()
    unknown = signed_ticket(ticket_message(theirs.data), b"s" * 32)
    assert_refused(workers.prefill().hand_off(unknown, MINE))
    assert not workers.rig.target.data.any()
    victim = workers.prefill("p2", seed=2)
    assert victim.hand_off(theirs.data, OTHERS).error is None
    workers.assert_holds(HERE, victim, OTHERS)


@pytest.mark.parametrize("field", ["first_token", "first_layer"])
def test_places_that_are_not_the_ticket_s(workers: Workers, field: str) -> None:
    """The wire knows no block of the receiver's: what could be out of range is tokens and
    layers."""

    def shift(chunk: kv_pb2.KvChunk) -> None:
        setattr(chunk, field, getattr(chunk, field) + 3)
        chunk.place_checksum = place_checksum(chunk)

    victim = workers.serve_another(ELSEWHERE)
    before = workers.rig.target.data.copy()
    ticket = workers.offer()
    attacker = workers.prefill(on_chunk=shift)
    assert_refused(attacker.finish(attacker.send(ticket.data, MINE, SECOND_HALF)))
    assert "outside of the reservation" in workers.aborted(ticket).message
    np.testing.assert_array_equal(workers.rig.target.data, before)
    workers.assert_holds(ELSEWHERE, victim, OTHERS)


@pytest.mark.parametrize("when", ["at once", "half sent", "committed"])
def test_a_ticket_that_is_used_already(workers: Workers, when: str) -> None:
    """Or replayed, by who has read it, while its own sender is not done yet."""
    ticket = workers.offer()
    victim, thief = workers.prefill("p2", seed=2), workers.prefill()
    pieces = [] if when == "at once" else [FIRST_HALF]
    key = victim.send(ticket.data, OTHERS, *pieces)
    if when == "committed":
        victim.sender.submit(Send(key, OTHERS, SECOND_HALF))
        assert victim.finish(key).error is None
        assert_refused(thief.hand_off(ticket.data, MINE))
    else:
        state = TicketState.RECEIVING if pieces else TicketState.RESERVED
        workers.until(ticket, state)
        assert_refused(thief.hand_off(ticket.data, MINE))
        rest = [SECOND_HALF] if pieces else [WHOLE]
        for piece in rest:
            victim.sender.submit(Send(key, OTHERS, piece))
        assert victim.finish(key).error is None
    assert isinstance(workers.rig.event(), TicketCommitted)
    workers.assert_no_event()
    workers.assert_holds(HERE, victim, OTHERS)


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_ticket_whose_blocks_another_request_has(workers: Workers, *, is_begun: bool) -> None:
    """Its request was cancelled, its blocks were given to another prompt, which is served."""
    late = workers.prefill()
    ticket = workers.offer()
    if is_begun:
        late.send(ticket.data, MINE, FIRST_HALF)
        workers.until(ticket, TicketState.RECEIVING)
    workers.rig.running.tickets.abort(ticket.ticket_id, "CANCELLED", "the client left")
    workers.aborted(ticket)
    workers.rig.running.tickets.release(ticket.ticket_id)
    victim = workers.serve_another()
    again = workers.prefill("p3", seed=3) if is_begun else late
    done = again.hand_off(ticket.data, MINE)
    assert_refused(done)
    workers.assert_no_event()
    workers.assert_holds(HERE, victim, OTHERS)


def test_a_lease_that_is_over(workers: Workers) -> None:
    """Its sender is about to send when the blocks go to another request."""
    may_go_on = threading.Event()

    def hold(chunk: kv_pb2.KvChunk) -> None:
        if chunk.first_token >= SECOND_HALF.first_token:
            assert may_go_on.wait(PATIENCE_S)

    slow = workers.prefill(on_chunk=hold)
    ticket = workers.offer()
    key = slow.send(ticket.data, MINE, FIRST_HALF, SECOND_HALF)
    try:
        workers.until(ticket, TicketState.RECEIVING)
        workers.let_the_lease_end()
        workers.aborted(ticket)
        victim = workers.serve_another()
    finally:
        may_go_on.set()
    assert slow.finish(key).error is not None
    workers.assert_no_event()
    workers.assert_holds(HERE, victim, OTHERS)


# Memory that is given away under a reader or a writer.


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_kv_that_its_sender_frees(workers: Workers, *, is_cancelled: bool) -> None:
    """A prefill worker's blocks have another prompt's KV as soon as it may have them back: what is
    committed is from before."""
    asked = threading.Event()

    def reuse(worker: PrefillWorker) -> None:
        fill(worker.pool, seed=9)

    def cancel(_: kv_pb2.KvChunk) -> None:
        if not asked.is_set():
            asked.set()
            freeing.sender.submit(Cancel("k", "CANCELLED", "the client left"))

    on_chunk = cancel if is_cancelled else lambda _: None
    freeing = workers.prefill(on_chunk=on_chunk, on_done=reuse)
    was = [token.copy() for token in tokens_of(freeing.pool, MINE)]
    ticket = workers.offer()
    done = freeing.hand_off(ticket.data, MINE)
    assert (done.error is not None) == is_cancelled
    if is_cancelled:
        workers.aborted(ticket)
    else:
        assert isinstance(workers.rig.event(), TicketCommitted)
        assert tokens_of(freeing.pool, MINE)[0].tolist() != was[0].tolist()
        np.testing.assert_array_equal(tokens_of(workers.rig.target, HERE), was)


def test_blocks_that_a_writer_is_still_in(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode worker gives an aborted request's blocks to nobody while KV is written there."""
    is_inside, may_go_on = threading.Event(), threading.Event()

    def held(function: Callable[..., str]) -> Callable[..., str]:
        def wait_and_store(*arguments: Any) -> str:
            is_inside.set()
            assert may_go_on.wait(PATIENCE_S)
            return function(*arguments)

        return wait_and_store

    for name in ("store", "payload_fault"):
        monkeypatch.setattr(receiver, name, held(getattr(receiver, name)))
    writer = workers.prefill()
    ticket = workers.offer()
    key = writer.send(ticket.data, MINE, WHOLE)
    assert is_inside.wait(PATIENCE_S)
    try:
        workers.rig.running.tickets.abort(ticket.ticket_id, "CANCELLED", "the client left")
        workers.assert_no_event()
        with pytest.raises(ValueError, match="its event is to come"):
            workers.rig.running.tickets.release(ticket.ticket_id)
    finally:
        may_go_on.set()
    workers.aborted(ticket)
    victim = workers.serve_another()
    assert writer.finish(key).error is not None
    workers.assert_holds(HERE, victim, OTHERS)


# A process that dies or freezes when a payload is packed and its header has not gone yet.

_SENDER = """
import signal, sys, threading, time
import numpy as np
from engine.kv.tensors.array import ArrayKvPool
from baton.types import KvLayout, Sample, WorkerIdentity
from engine.kv.range import KvRange
from baton.v1 import kv_pb2
from kv_transfer.send_connection import Finish, Send
from kv_transfer.handshake import SenderConfig
from kv_transfer.sender import Sender
from kv_transfer.transport.connector import make_connector

class Tapped:
    def __init__(self, inner):
        self.inner, self.is_due = inner, True
    def __getattr__(self, name):
        return getattr(self.inner, name)
    def send(self, frame, staged=None, *, more=False):
        if isinstance(frame, kv_pb2.KvChunk) and self.is_due:
            self.is_due = False
            # To this thread: a signal to the process may be another thread's to take, and this
            # one sends its header before that stops it.
            signal.pthread_kill(threading.get_ident(), int(sys.argv[3]))
        self.inner.send(frame, staged, more=more)

name, ticket = sys.argv[1], bytes.fromhex(sys.argv[2])
connect = make_connector(name)
pool = ArrayKvPool(KvLayout("m", 3, 2, 4, "int64", 4), 16)
pool.data[...] = np.random.default_rng(1).integers(1, 1 << 50, pool.data.shape)
config = SenderConfig(
    WorkerIdentity("p9", 1), pool, lambda *where: Tapped(connect(*where)), time.monotonic,
    1e6, 1e6, 1e6, 1 << 20,
)
sender = Sender(config, lambda done: print(done.error and done.error.reason, flush=True))
sender.begin("k", ticket)
sys.stdin.readline()
sender.submit(Send("k", (1, 2), KvRange(0, 6, 0, 3)))
sender.submit(Finish("k", 6, (Sample(7),), 0.0))
sys.stdin.read()
"""


@contextmanager
def sender_process(
    workers: Workers, ticket: OfferedTicket, signum: signal.Signals
) -> Iterator[subprocess.Popen[str]]:
    """A prefill worker p9 that has presented a ticket, and will send itself a signal between a
    payload and its header."""
    transport = workers.transport
    if kv_transport(transport).needs_device:
        pytest.skip("KV on a device has these moments, too: its frames go as those of shm do")
    command = [sys.executable, "-c", _SENDER, transport, ticket.data.hex(), str(int(signum))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            workers.until(ticket, TicketState.RESERVED)
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_a_sender_that_dies_between_payload_and_header(workers: Workers) -> None:
    ticket = workers.offer()
    with sender_process(workers, ticket, signal.SIGKILL) as process:
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
        workers.aborted(ticket)
        workers.rig.running.tickets.release(ticket.ticket_id)
        restarted = workers.prefill("p9", seed=2, generation=2)
        theirs = workers.offer()
        assert restarted.hand_off(theirs.data, OTHERS).error is None
        assert isinstance(workers.rig.event(), TicketCommitted)
    workers.assert_holds(HERE, restarted, OTHERS)
    assert_refused(restarted.hand_off(ticket.data, MINE))
    workers.assert_holds(HERE, restarted, OTHERS)


@pytest.mark.slow
def test_a_sender_that_is_frozen_between_payload_and_header(workers: Workers) -> None:
    """When it goes on, its ticket's lease is over and another request has the blocks."""
    ticket = workers.offer()
    with sender_process(workers, ticket, signal.SIGSTOP) as process:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        workers.let_the_lease_end()
        workers.aborted(ticket)
        workers.rig.running.tickets.release(ticket.ticket_id)
        victim = workers.serve_another()
        os.kill(process.pid, signal.SIGCONT)
        assert process.stdout is not None
        assert process.stdout.readline() == "HANDOFF_FAILED\n"
    workers.assert_no_event()
    workers.assert_holds(HERE, victim, OTHERS)


def test_a_receiver_that_is_started_again_between_payload_and_header(
    workers: Workers, transport: str
) -> None:
    """At its address, where it can choose it, there is a ticket of the same number, for the same
    blocks."""
    restarted: list[OtherDecode] = []
    theirs: list[OfferedTicket] = []
    ticket = workers.offer()

    def restart(_: kv_pb2.KvChunk) -> None:
        if restarted:
            return
        endpoint = workers.rig.running.endpoints[0]
        workers.rig.running.close()
        port = int(endpoint.address.rpartition(":")[2]) if ":" in endpoint.address else 0
        other = OtherDecode(workers, transport, WorkerIdentity("d0", 8), ticket.ticket_id, port)
        restarted.append(other)
        theirs.append(other.offer())

    late = workers.prefill(on_chunk=restart)
    try:
        assert_refused(late.hand_off(ticket.data, MINE))
        (other,) = restarted
        assert_refused(late.hand_off(ticket.data, MINE))
        other.is_untouched()
        other.serve(theirs[0])
    finally:
        for other in restarted:
            other.running.close()


# Names and addresses that two have.


class OtherDecode:
    """A decode worker beside d0, or after it; it draws a ticket number that d0 has drawn."""

    def __init__(
        self,
        workers: Workers,
        transport: str,
        identity: WorkerIdentity,
        ticket_id: int,
        port: int = 0,
    ) -> None:
        self.workers = workers
        self.pool = type(workers.rig.target)(workers.rig.target.layout, 16)
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.running = open_receiver(
            ReceiverConfig(identity, self.pool, max_chunk_bytes=512),
            self.events.put,
            lambda: workers.now[0],
            transports=(transport,),
            listen=TransportConfig(port=port),
            rules=TicketRules(draw_id=lambda: ticket_id),
        )

    def offer(self) -> OfferedTicket:
        spec = SequenceSpec("r0", tuple(range(NUM_TOKENS)), Sampling())
        return self.running.tickets.offer(spec, HERE, 0, NUM_TOKENS)

    def is_untouched(self) -> None:
        assert not self.pool.data.any()
        assert self.events.empty()

    def serve(self, ticket: OfferedTicket) -> None:
        """Its own request is served, and right."""
        victim = self.workers.prefill("p2", seed=2)
        assert victim.hand_off(ticket.data, OTHERS).error is None
        assert isinstance(self.events.get(timeout=PATIENCE_S), TicketCommitted)
        assert_holds(self.pool, HERE, victim.pool, OTHERS)


@pytest.mark.parametrize(
    "identity",
    [WorkerIdentity("d1", 7), WorkerIdentity("d0", 8), WorkerIdentity("d0", 7)],
    ids=["another name", "a later boot", "the same name and boot"],
)
def test_two_decode_workers_with_one_address(
    workers: Workers, transport: str, identity: WorkerIdentity
) -> None:
    """A ticket of d0 with an address that now belongs to another worker, which has a ticket of this
    number, even for the same request, and may have d0's name and boot number, as a copied machine
    has."""
    data = workers.offer().data
    offered = parse_ticket(data)
    other = OtherDecode(workers, transport, identity, offered.ticket_id)
    try:
        theirs = other.offer()
        moved = common_fields(offered.owner, offered.layout, other.running.endpoints)
        message = ticket_message(data)
        del message.endpoints[:]
        message.endpoints.extend(moved.endpoints)
        misled = signed_ticket(message, b"q" * 32)
        assert workers.prefill().hand_off(misled, MINE).error is not None
        other.is_untouched()
        other.serve(theirs)
    finally:
        other.running.close()


def test_two_prefill_workers_with_one_name(workers: Workers) -> None:
    """One name, one boot number, one key: each one's KV goes into its own request."""
    one, two = workers.prefill("p1", seed=1), workers.prefill("p1", seed=2)
    first, second = workers.offer(HERE), workers.offer(ELSEWHERE)
    one.send(first.data, MINE, FIRST_HALF)
    two.send(second.data, MINE, SECOND_HALF)
    one.sender.submit(Send("k", MINE, SECOND_HALF))
    two.sender.submit(Send("k", MINE, FIRST_HALF))
    for worker in (one, two):
        assert worker.finish("k").error is None
        assert isinstance(workers.rig.event(), TicketCommitted)
    assert_holds(workers.rig.target, HERE, one.pool, MINE)
    assert_holds(workers.rig.target, ELSEWHERE, two.pool, MINE)

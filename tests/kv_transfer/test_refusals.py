"""What a receiver must not believe: it writes nothing, says so, and disturbs no other ticket."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.types import KvLayout, Sampling, SequenceSpec, WorkerIdentity
from baton.v1 import kv_pb2, sampling_pb2
from baton.wire import layout_to_proto
from engine.kv.tensors.array import ArrayKvPool
from kv_transfer.frame import Frame, FrameError, chunk_checksum, commit_checksum, place_checksum
from kv_transfer.handshake import ReceiverConfig
from kv_transfer.receiver import Receiver, ReceiverSession
from kv_transfer.ticket import (
    OfferedTicket,
    TicketAborted,
    TicketCommitted,
    TicketEvent,
    parse_ticket,
)
from kv_transfer.ticket_table import TicketRules, TicketTable

LAYOUT = KvLayout("m", 2, 1, 2, "int64", 4)
TOKEN_LAYER_BYTES = LAYOUT.token_layer_bytes
OWNER = WorkerIdentity("d0", 7)
NUM_TOKENS = 6


@dataclass
class Desk:
    """A receiver, its pool, and what it said and told."""

    pool: ArrayKvPool = field(default_factory=lambda: ArrayKvPool(LAYOUT, 8))
    events: list[TicketEvent] = field(default_factory=list)
    replies: list[Frame] = field(default_factory=list)
    next_id: int = 0

    def __post_init__(self) -> None:
        self.table = TicketTable(
            OWNER,
            LAYOUT,
            (),
            TicketRules(10.0, secret=b"s" * 32, draw_id=self.draw),
            self.events.append,
            lambda: 0.0,
        )
        self.receiver = Receiver(ReceiverConfig(OWNER, self.pool, 1, 1 << 12), self.table)

    def draw(self) -> int:
        self.next_id += 1
        return self.next_id

    def session(self) -> ReceiverSession:
        session = self.receiver.session(self.replies.append)
        session.on_frame(hello(), memoryview(b""))
        assert isinstance(self.replies.pop(), kv_pb2.KvAccept)
        return session

    def offer(self, block_ids: tuple[int, ...] = (3, 5)) -> OfferedTicket:
        spec = SequenceSpec("r", tuple(range(NUM_TOKENS)), Sampling(), tenant=b"t" * 16)
        return self.table.offer(spec, block_ids, 1, NUM_TOKENS)

    def begun(self) -> tuple[ReceiverSession, OfferedTicket]:
        session, offered = self.session(), self.offer()
        session.on_frame(kv_pb2.KvBegin(ticket=offered.data), memoryview(b""))
        assert not self.replies
        return session, offered

    def take(self, session: ReceiverSession, chunk: kv_pb2.KvChunk, payload: bytes) -> list[Frame]:
        """The answers to a chunk; its credit always comes back."""
        session.on_frame(chunk, memoryview(bytearray(payload)))
        credit, *rest = self.replies
        assert credit == kv_pb2.KvCredit(slots=[chunk.slot])
        self.replies.clear()
        return rest

    @property
    def is_untouched(self) -> bool:
        return not self.pool.data.any()


def hello(**changes: int) -> kv_pb2.KvHello:
    message = kv_pb2.KvHello(
        min_version=1,
        max_version=1,
        worker_id="p0",
        generation=3,
        layout=layout_to_proto(LAYOUT),
    )
    for name, value in changes.items():
        setattr(message, name, value)
    return message


def chunk_of(
    ticket_id: int, first_token: int, num_tokens: int, layer: int, seed: int = 1
) -> tuple[kv_pb2.KvChunk, bytes]:
    payload = np.random.default_rng(seed).bytes(num_tokens * TOKEN_LAYER_BYTES)
    header = kv_pb2.KvChunk(
        ticket_id=ticket_id,
        epoch=1,
        first_token=first_token,
        num_tokens=num_tokens,
        first_layer=layer,
        num_layers=1,
        payload_bytes=len(payload),
        slot=3,
    )
    return signed(header, payload), payload


def signed(header: kv_pb2.KvChunk, payload: bytes) -> kv_pb2.KvChunk:
    """The chunk with the right checksum of what it says."""
    header.place_checksum = place_checksum(header)
    header.checksum = chunk_checksum(header, (memoryview(payload),))
    return header


def commit_of(offered: OfferedTicket, *chunks: kv_pb2.KvChunk, **changes: int) -> kv_pb2.KvCommit:
    message = kv_pb2.KvCommit(
        ticket_id=offered.ticket_id,
        epoch=1,
        num_tokens=NUM_TOKENS,
        first_tokens=[sampling_pb2.SampledToken(token_id=9)],
    )
    wrong = changes.pop("checksum", 0)
    for name, value in changes.items():
        setattr(message, name, value)
    total = sum(c.checksum for c in chunks) + wrong
    message.checksum = commit_checksum(message, total)
    return message


Damage = Callable[[kv_pb2.KvChunk, bytes], bytes]


def flip(header: kv_pb2.KvChunk, payload: bytes) -> bytes:
    del header
    return payload[:5] + bytes([payload[5] ^ 1]) + payload[6:]


def truncate(header: kv_pb2.KvChunk, payload: bytes) -> bytes:
    del header
    return payload[:-8]


def shrink_honestly(header: kv_pb2.KvChunk, payload: bytes) -> bytes:
    header.payload_bytes = len(payload) - 8
    signed(header, payload[:-8])
    return payload[:-8]


def swap(header: kv_pb2.KvChunk, payload: bytes) -> bytes:
    del header
    return chunk_of(1, 0, len(payload) // TOKEN_LAYER_BYTES, 0, seed=2)[1]


def reach_cached(header: kv_pb2.KvChunk, payload: bytes) -> bytes:
    header.first_token = 0
    signed(header, payload)
    return payload


def reach_beyond(header: kv_pb2.KvChunk, payload: bytes) -> bytes:
    header.first_token = NUM_TOKENS - 1
    signed(header, payload)
    return payload


def reach_other_layers(header: kv_pb2.KvChunk, payload: bytes) -> bytes:
    header.first_layer = 2
    signed(header, payload)
    return payload


def claim_nothing(header: kv_pb2.KvChunk, payload: bytes) -> bytes:
    del payload
    header.num_tokens = 0
    signed(header, b"")
    return b""


@pytest.mark.parametrize(
    "damage",
    [
        flip,
        truncate,
        shrink_honestly,
        swap,
        reach_cached,
        reach_beyond,
        reach_other_layers,
        claim_nothing,
    ],
)
def test_a_bad_chunk_kills_its_ticket_alone(damage: Damage):
    desk = Desk()
    session, offered = desk.begun()
    other = desk.offer((6, 7))
    session.on_frame(kv_pb2.KvBegin(ticket=other.data), memoryview(b""))
    header, payload = chunk_of(offered.ticket_id, 2, 3, 0)
    (answer,) = desk.take(session, header, damage(header, payload))
    assert isinstance(answer, kv_pb2.KvAbort)
    assert answer.reason == "HANDOFF_FAILED"
    assert "could not store" not in answer.message, "the pool is no judge of sizes"
    assert desk.is_untouched
    (event,) = desk.events
    assert isinstance(event, TicketAborted)
    assert (event.ticket_id, event.reason) == (offered.ticket_id, "HANDOFF_FAILED")
    assert desk.take(session, *chunk_of(offered.ticket_id, 2, 3, 0))
    assert desk.is_untouched
    assert not desk.take(session, *chunk_of(other.ticket_id, 2, 3, 0))


def test_a_chunk_that_came_before_kills_its_ticket():
    desk = Desk()
    session, offered = desk.begun()
    assert not desk.take(session, *chunk_of(offered.ticket_id, 1, 3, 0))
    before = desk.pool.data.copy()
    assert desk.take(session, *chunk_of(offered.ticket_id, 3, 2, 0, seed=2))
    assert len(desk.events) == 1
    np.testing.assert_array_equal(desk.pool.data, before)


@pytest.mark.parametrize("what", ["stale epoch", "other connection", "unknown ticket", "not begun"])
def test_a_misdirected_chunk_is_dropped_and_disturbs_nobody(what: str):
    desk = Desk()
    session, offered = desk.begun()
    header, payload = chunk_of(offered.ticket_id, 1, 5, 0)
    speaker = session
    match what:
        case "stale epoch":
            header.epoch = 0
        case "other connection":
            speaker = desk.session()
        case "unknown ticket":
            header.ticket_id = 999
        case "not begun":
            header.ticket_id = desk.offer((6, 7)).ticket_id
    signed(header, payload)
    (answer,) = desk.take(speaker, header, payload)
    assert isinstance(answer, kv_pb2.KvAbort)
    assert desk.is_untouched
    assert not desk.events
    whole = [chunk_of(offered.ticket_id, 1, 5, layer) for layer in range(2)]
    for good in whole:
        assert not desk.take(session, *good)
    session.on_frame(commit_of(offered, *(header for header, _ in whole)), memoryview(b""))
    assert isinstance(desk.events[0], TicketCommitted)


@pytest.mark.parametrize(
    "changes", [{"checksum": 1}, {"num_tokens": NUM_TOKENS - 1}, {"num_tokens": NUM_TOKENS + 1}, {}]
)
def test_a_commit_that_does_not_fit_kills_the_ticket(changes: dict[str, int]):
    desk = Desk()
    session, offered = desk.begun()
    chunks = [chunk_of(offered.ticket_id, 1, 5, layer) for layer in range(2)]
    sent = chunks if changes else chunks[:1]
    for chunk in sent:
        assert not desk.take(session, *chunk)
    session.on_frame(commit_of(offered, *(h for h, _ in sent), **changes), memoryview(b""))
    assert isinstance(desk.replies[0], kv_pb2.KvAbort)
    assert isinstance(desk.events[0], TicketAborted)


def test_a_ticket_is_used_once():
    desk = Desk()
    session, offered = desk.begun()
    desk.session().on_frame(kv_pb2.KvBegin(ticket=offered.data), memoryview(b""))
    assert isinstance(desk.replies.pop(), kv_pb2.KvAbort)
    session.on_frame(kv_pb2.KvBegin(ticket=offered.data), memoryview(b""))
    assert isinstance(desk.replies.pop(), kv_pb2.KvAbort)
    assert not desk.take(session, *chunk_of(offered.ticket_id, 1, 5, 0))
    assert not desk.events


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("generation", 6),
        ("worker_id", "d1"),
        ("ticket_id", 2),
        ("epoch", 2),
        ("request_id", "other"),
        ("tenant", b"u" * 16),
        ("num_cached_tokens", 0),
        ("num_tokens", 8),
        ("lease_ms", 10**6),
        ("mac", b""),
        ("mac", bytes(32)),
    ],
)
def test_a_changed_ticket_is_refused(name: str, value: object):
    desk = Desk()
    session, offered = desk.session(), desk.offer()
    forged = kv_pb2.KvTicket.FromString(offered.data)
    setattr(forged, name, value)
    session.on_frame(kv_pb2.KvBegin(ticket=forged.SerializeToString()), memoryview(b""))
    assert isinstance(desk.replies.pop(), kv_pb2.KvAbort)
    session.on_frame(kv_pb2.KvBegin(ticket=offered.data), memoryview(b""))
    assert not desk.replies
    assert not desk.events


@settings(deadline=None, database=None, max_examples=200)
@given(st.data())
def test_no_damaged_ticket_means_anything_else(data):
    desk = Desk()
    offered = desk.offer()
    raw = bytearray(offered.data)
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    session = desk.session()
    try:
        session.on_frame(kv_pb2.KvBegin(ticket=bytes(raw)), memoryview(b""))
    except FrameError:
        return
    assert desk.replies or parse_ticket(bytes(raw)) == parse_ticket(offered.data)


def test_order_of_frames_is_kept():
    desk = Desk()
    offered = desk.offer()
    early = desk.receiver.session(desk.replies.append)
    with pytest.raises(FrameError, match="before"):
        early.on_frame(kv_pb2.KvBegin(ticket=offered.data), memoryview(b""))
    session = desk.session()
    with pytest.raises(FrameError, match="second"):
        session.on_frame(hello(), memoryview(b""))
    with pytest.raises(FrameError, match="from a sender"):
        session.on_frame(kv_pb2.KvCommitted(), memoryview(b""))
    refused = desk.receiver.session(desk.replies.append)
    refused.on_frame(hello(min_version=3, max_version=4), memoryview(b""))
    assert desk.replies == [
        kv_pb2.KvRefuse(field="protocol_version", expected="1..1", actual="3..4")
    ]
    with pytest.raises(FrameError, match="refusal"):
        refused.on_frame(hello(), memoryview(b""))


U32 = st.one_of(st.integers(0, 9), st.just(2**32 - 1))
U64 = st.one_of(st.integers(0, 9), st.just(2**64 - 1))
HOSTILE = st.one_of(
    st.builds(
        kv_pb2.KvChunk,
        ticket_id=U64,
        epoch=U32,
        first_token=U32,
        num_tokens=U32,
        first_layer=U32,
        num_layers=U32,
        checksum=U64,
        payload_bytes=U32,
        slot=U32,
    ),
    st.builds(
        kv_pb2.KvCommit, ticket_id=U64, epoch=U32, num_tokens=U32, checksum=U64, exposed_us=U64
    ),
    st.builds(kv_pb2.KvRenew, ticket_ids=st.lists(U64, max_size=3)),
    st.builds(kv_pb2.KvAbort, ticket_id=U64, epoch=U32, reason=st.text(max_size=5)),
    st.builds(kv_pb2.KvBegin, ticket=st.binary(max_size=30)),
    st.builds(kv_pb2.KvCredit, slots=st.lists(U32, max_size=3)),
    st.builds(kv_pb2.KvHello, max_version=U32),
)


@settings(deadline=None, database=None, max_examples=150)
@given(st.lists(st.tuples(HOSTILE, st.binary(max_size=70)), max_size=12))
def test_sound_frames_of_nonsense_write_nothing_and_raise_nothing_else(script):
    desk = Desk()
    session, offered = desk.begun()
    try:
        for frame, payload in script:
            session.on_frame(frame, memoryview(bytearray(payload)))
    except FrameError:
        session.on_close("broke the rules")
    assert desk.is_untouched
    assert all(isinstance(event, TicketAborted) for event in desk.events)
    desk.table.abort(offered.ticket_id, "CANCELLED", "")
    assert [event.ticket_id for event in desk.events] == [offered.ticket_id]


def test_an_abort_during_an_unpack_is_told_after_it():
    desk = Desk()
    session, offered = desk.begun()
    unpack, seen = desk.pool.unpack, []

    def abort_meanwhile(*args: object) -> None:
        desk.table.abort(offered.ticket_id, "CANCELLED", "the client left")
        seen.extend(desk.events)
        unpack(*args)  # type: ignore[arg-type]

    desk.pool.unpack = abort_meanwhile  # type: ignore[method-assign]
    desk.take(session, *chunk_of(offered.ticket_id, 1, 5, 0))
    assert seen == []
    assert desk.events == [TicketAborted(offered.ticket_id, "CANCELLED", "the client left")]
    (answer,) = desk.take(session, *chunk_of(offered.ticket_id, 1, 5, 1))
    assert isinstance(answer, kv_pb2.KvAbort)
    assert answer.reason == "CANCELLED"


def test_a_pool_that_cannot_store_kills_the_ticket_alone():
    desk = Desk()
    session, offered = desk.begun()

    def refuse(*args: object) -> None:
        raise ValueError(f"no room: {len(args)}")

    desk.pool.unpack = refuse  # type: ignore[method-assign]
    (answer,) = desk.take(session, *chunk_of(offered.ticket_id, 1, 5, 0))
    assert isinstance(answer, kv_pb2.KvAbort)
    assert [type(event) for event in desk.events] == [TicketAborted]


def test_a_sender_whose_blocks_have_no_tokens_is_refused():
    desk = Desk()
    session = desk.receiver.session(desk.replies.append)
    greeting = hello()
    greeting.layout.block_size = 0
    session.on_frame(greeting, memoryview(b""))
    (refusal,) = desk.replies
    assert isinstance(refusal, kv_pb2.KvRefuse)
    assert (refusal.field, refusal.actual) == ("block_size", "0")
    assert session.handshake.is_refused


@pytest.mark.parametrize("num_credits", range(1, 20))
def test_credits_come_back_in_batches_and_never_all_stay_away(num_credits: int):
    desk = Desk()
    desk.receiver = Receiver(ReceiverConfig(OWNER, desk.pool, num_credits, 1 << 12), desk.table)
    session, free = desk.session(), set(range(num_credits))
    for number in range(100):
        assert free, f"no room for chunk {number}"
        slot = free.pop()
        chunk, payload = chunk_of(99, 0, 1, 0)
        chunk.slot = slot
        session.on_frame(chunk, memoryview(bytearray(payload)))
        for reply in desk.replies:
            if isinstance(reply, kv_pb2.KvCredit):
                assert not free & set(reply.slots)
                free |= set(reply.slots)
        desk.replies.clear()


def test_a_chunk_from_before_the_owners_blocks_is_refused() -> None:
    """If all layers of a model are windowed, the block table names other owners' blocks there."""
    desk = Desk()
    session = desk.session()
    spec = SequenceSpec("r", tuple(range(NUM_TOKENS)), Sampling())
    offered = desk.table.offer(spec, (0, 5), 0, NUM_TOKENS, held_start=4)
    session.on_frame(kv_pb2.KvBegin(ticket=offered.data), memoryview(b""))
    (answer,) = desk.take(session, *chunk_of(offered.ticket_id, 3, 3, 0))
    assert isinstance(answer, kv_pb2.KvAbort)
    assert "outside of the reservation" in answer.message
    assert desk.is_untouched
    assert [type(event) for event in desk.events] == [TicketAborted]

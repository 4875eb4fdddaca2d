"""Ten thousand chunks that are damaged on the way: none becomes KV, and no sequence that lacks one
is ever committed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from baton.types import KvLayout, Sampling, SequenceSpec, WorkerIdentity
from baton.v1 import kv_pb2
from baton.wire import layout_to_proto
from baton_kernels.word_sum import host_checksum
from engine.kv.range import KvRange
from engine.kv.tensors.array import ArrayKvPool
from engine.kv.tensors.paged import TorchKvPool
from kv_transfer.codec import ChunkCodec
from kv_transfer.device_memory import Payload
from kv_transfer.frame import (
    PREAMBLE_BYTES,
    Frame,
    FrameError,
    chunk_checksum,
    commit_checksum,
    decode_header,
    decode_preamble,
    encode,
    place_checksum,
)
from kv_transfer.handshake import ReceiverConfig
from kv_transfer.receiver import Receiver, ReceiverSession
from kv_transfer.ticket import TicketAborted, TicketCommitted, TicketEvent
from kv_transfer.ticket_table import TicketRules, TicketTable
from kv_transfer.wire_format import wire_format
from tests.support.device_double import DeviceArrayPool

LAYOUT = KvLayout("m", 2, 1, 16, "float32", 4)
#: Blocks of tickets, and blocks that no ticket is for.
BLOCKS, OTHERS = (2, 0), (1, 3)
NUM_TOKENS = 8
NUM_DAMAGED = 10_000
MAX_PAYLOAD_BYTES = 1 << 12
#: Four chunks of one size: two blocks in each of two layers.
PIECES = [KvRange(token, 4, layer, 1) for token in (0, 4) for layer in (0, 1)]


@dataclass
class Parcel:
    """A chunk as it is sent."""

    header: kv_pb2.KvChunk
    payload: bytes

    @property
    def raw(self) -> bytes:
        return encode(self.header, len(self.payload)) + self.payload


def frame_of(raw: bytes) -> tuple[Frame, memoryview]:
    """As a stream transport reads it."""
    preamble = decode_preamble(raw[:PREAMBLE_BYTES], MAX_PAYLOAD_BYTES)
    end = PREAMBLE_BYTES + preamble.header_bytes
    frame, payload = decode_header(preamble, raw[PREAMBLE_BYTES:end]), raw[end:]
    is_chunk = isinstance(frame, kv_pb2.KvChunk)
    if len(payload) != (frame.payload_bytes if is_chunk else 0) or not is_chunk:
        raise FrameError("header and preamble give different sizes of the payload")
    return frame, memoryview(bytearray(payload))


@dataclass
class Wire:
    """A receiver, fed with bytes as a stream would feed it, and the sender's blocks. is_landing:
    payloads are written into blocks by the stream. is_native: by the kernel that computes the
    checksum meanwhile, where this machine has it. is_device: payloads are in a device's memory,
    with the device's checksum."""

    wire_dtype: str
    is_landing: bool = False
    is_native: bool = False
    is_device: bool = False
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    events: list[TicketEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.source = ArrayKvPool(LAYOUT, 2)
        pool: ArrayKvPool | TorchKvPool
        if self.is_native:
            pool = TorchKvPool(LAYOUT, 4, torch.device("cpu"))
            self.blocks = pool.tensor.numpy()
        else:
            pool = (DeviceArrayPool if self.is_device else ArrayKvPool)(LAYOUT, 4)
            self.blocks = pool.data
        self.blocks[list(OTHERS)] = 7
        self.codec = ChunkCodec(self.source, wire_format(self.wire_dtype, LAYOUT))
        owner = WorkerIdentity("d0", 7)
        self.table = TicketTable(
            owner,
            LAYOUT,
            (),
            TicketRules(10.0, secret=b"s" * 32, draw_id=self._draw),
            self.events.append,
            lambda: 0.0,
        )
        self.receiver = Receiver(
            ReceiverConfig(owner, pool, 4, MAX_PAYLOAD_BYTES, self.wire_dtype), self.table
        )
        self.session = self._greeted()
        self.earlier: list[Parcel] = []

    def offer(self) -> tuple[int, int]:
        """Ticket id and epoch of a ticket that this connection has presented."""
        spec = SequenceSpec("r", tuple(range(NUM_TOKENS)), Sampling())
        offered = self.table.offer(spec, BLOCKS, 0, NUM_TOKENS)
        self.session.on_frame(kv_pb2.KvBegin(ticket=offered.data), memoryview(b""))
        return offered.ticket_id, kv_pb2.KvTicket.FromString(offered.data).epoch

    def parcels(self, ticket_id: int, epoch: int) -> list[Parcel]:
        """A sequence of its own, as the sender packs it."""
        self.source.data[...] = np.random.default_rng(ticket_id % 2**32).standard_normal(
            self.source.data.shape
        )
        found = []
        for piece in PIECES:
            payload = memoryview(bytearray(self.codec.wire.num_bytes(piece)))
            self.codec.pack((0, 1), piece, payload)
            header = kv_pb2.KvChunk(
                ticket_id=ticket_id,
                epoch=epoch,
                first_token=piece.first_token,
                num_tokens=piece.num_tokens,
                first_layer=piece.first_layer,
                num_layers=piece.num_layers,
                payload_bytes=len(payload),
            )
            header.place_checksum = place_checksum(header)
            header.checksum = (
                host_checksum(torch.frombuffer(payload, dtype=torch.uint8), header.place_checksum)
                if self.is_device
                else chunk_checksum(header, (payload,))
            )
            found.append(Parcel(header, bytes(payload)))
        return found

    def deliver(self, raw: bytes) -> None:
        """What a stream transport does with bytes; a connection that cannot go on is made anew."""
        try:
            frame, payload = frame_of(raw)
            landing = self.session.land(frame) if self.is_landing else ()
            start = 0
            for view in landing:
                view[:] = payload[start : start + len(view)]
                start += len(view)
            self.session.on_frame(frame, self._staged(payload[start:]))
        except FrameError as error:
            self.session.on_close(error.message)
            self.session = self._greeted()

    def commit(self, ticket_id: int, epoch: int, parcels: list[Parcel]) -> None:
        frame = kv_pb2.KvCommit(ticket_id=ticket_id, epoch=epoch, num_tokens=NUM_TOKENS)
        frame.first_tokens.add(token_id=1)
        chunks = sum(parcel.header.checksum for parcel in parcels)
        frame.checksum = commit_checksum(frame, chunks)
        self.session.on_frame(frame, memoryview(b""))

    def is_whole(self, parcels: list[Parcel]) -> bool:
        """Whether the receiver's blocks hold just what these parcels held."""
        expected = ArrayKvPool(LAYOUT, 4)
        codec = ChunkCodec(expected, self.codec.wire)
        for piece, parcel in zip(PIECES, parcels, strict=True):
            codec.unpack(BLOCKS, piece, memoryview(bytearray(parcel.payload)))
        return np.array_equal(expected.data[list(BLOCKS)], self.blocks[list(BLOCKS)])

    def is_within(self) -> bool:
        """Whether no block was written that no ticket is for."""
        return bool((self.blocks[list(OTHERS)] == 7).all())

    def _greeted(self) -> ReceiverSession:
        replies: list[object] = []
        kind = (
            kv_pb2.KV_PAYLOAD_CHECKSUM_WORD_SUM
            if self.is_device
            else kv_pb2.KV_PAYLOAD_CHECKSUM_UNSPECIFIED
        )
        session = self.receiver.session(replies.append, checksum=kind)
        hello = kv_pb2.KvHello(
            min_version=1, max_version=1, worker_id="p0", layout=layout_to_proto(LAYOUT)
        )
        session.on_frame(hello, memoryview(b""))
        assert isinstance(replies[0], kv_pb2.KvAccept)
        assert replies[0].payload_checksum == kind
        return session

    def _staged(self, payload: memoryview) -> Payload:
        """Where the transport has put it."""
        if not self.is_device:
            return payload
        return torch.frombuffer(payload, dtype=torch.uint8) if payload else torch.empty(0).byte()

    def _draw(self) -> int:
        return self.rng.getrandbits(64)


def flipped(wire: Wire, parcels: list[Parcel], at: int) -> bytes:
    """One bit, anywhere: preamble, header or payload."""
    raw = bytearray(parcels[at].raw)
    bit = wire.rng.randrange(8 * len(raw))
    raw[bit // 8] ^= 1 << bit % 8
    return bytes(raw)


def garbled(wire: Wire, parcels: list[Parcel], at: int) -> bytes:
    """Some bytes in a row, anywhere."""
    raw = bytearray(parcels[at].raw)
    start = wire.rng.randrange(len(raw))
    count = min(wire.rng.randint(1, 16), len(raw) - start)
    raw[start : start + count] = bytes(
        byte ^ wire.rng.randint(1, 255) for byte in raw[start : start + count]
    )
    return bytes(raw)


def truncated(wire: Wire, parcels: list[Parcel], at: int) -> bytes:
    """Cut, and told to be so short."""
    parcel = parcels[at]
    header = kv_pb2.KvChunk()
    header.CopyFrom(parcel.header)
    header.payload_bytes = wire.rng.randrange(len(parcel.payload))
    return Parcel(header, parcel.payload[: header.payload_bytes]).raw


def swapped(wire: Wire, parcels: list[Parcel], at: int) -> bytes:
    """Another chunk's payload and checksum under this one's place."""
    other = parcels[(at + wire.rng.randint(1, 3)) % 4]
    header = kv_pb2.KvChunk()
    header.CopyFrom(parcels[at].header)
    header.checksum = other.header.checksum
    return Parcel(header, other.payload).raw


def stale(wire: Wire, parcels: list[Parcel], at: int) -> bytes:
    """What was sent for an earlier ticket, under this one's number."""
    old = wire.earlier[at] if wire.earlier else parcels[(at + 1) % 4]
    header = kv_pb2.KvChunk()
    header.CopyFrom(parcels[at].header)
    header.checksum = old.header.checksum
    return Parcel(header, old.payload).raw


def late(wire: Wire, parcels: list[Parcel], at: int) -> bytes:
    """What was sent for an earlier ticket, as it was."""
    return (wire.earlier or parcels[at - 1 :])[0].raw


def misdirected(wire: Wire, parcels: list[Parcel], at: int) -> bytes:
    """To another ticket that this connection holds."""
    header = kv_pb2.KvChunk()
    header.CopyFrom(parcels[at].header)
    header.ticket_id, header.epoch = wire.offer()
    return Parcel(header, parcels[at].payload).raw


def misplaced(wire: Wire, parcels: list[Parcel], at: int) -> bytes:
    """To another place in its own ticket."""
    header = kv_pb2.KvChunk()
    header.CopyFrom(parcels[at].header)
    place = PIECES[(at + wire.rng.randint(1, 3)) % 4]
    header.first_token, header.first_layer = place.first_token, place.first_layer
    return Parcel(header, parcels[at].payload).raw


Damage = Callable[[Wire, list[Parcel], int], bytes]
DAMAGES: list[Damage] = [
    flipped,
    garbled,
    truncated,
    swapped,
    stale,
    late,
    misdirected,
    misplaced,
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wire_dtype", "how"),
    [
        ("float32", {}),
        # Other bytes by the ways of float32.
        pytest.param("int8", {}, marks=pytest.mark.long),
        ("float32", {"is_landing": True}),
        ("float32", {"is_native": True}),
        ("float32", {"is_device": True}),
        pytest.param("int8", {"is_device": True}, marks=pytest.mark.long),
    ],
    ids=["staged", "int8", "landed", "native", "device", "device int8"],
)
def test_no_damaged_chunk_becomes_a_token(wire_dtype, how, monkeypatch):
    monkeypatch.setattr("kv_transfer.codec.MIN_VIEW_BYTES", 1)
    wire, caught, harmless = Wire(wire_dtype, **how), Counter[str](), 0
    while caught.total() < NUM_DAMAGED // 6:
        damage = wire.rng.choice(DAMAGES)
        ticket_id, epoch = wire.offer()
        parcels = wire.parcels(ticket_id, epoch)
        at = wire.rng.randrange(4)
        raw = damage(wire, parcels, at)
        wire.blocks[list(BLOCKS)] = 0
        for number, parcel in enumerate(parcels):
            wire.deliver(raw if number == at else parcel.raw)
        wire.commit(ticket_id, epoch, parcels)
        wire.earlier = parcels
        outcomes = [event for event in wire.events if event.ticket_id == ticket_id]
        if any(isinstance(event, TicketCommitted) for event in outcomes):
            # Only what a stream does not look at may differ, which is the slot.
            assert wire.is_whole(parcels), (damage.__name__, raw.hex())
            harmless += 1
        else:
            caught[damage.__name__] += 1
            assert len(outcomes) <= 1
        assert wire.is_within()
        wire.table.abort_all("CANCELLED", "the next one")
        for event in wire.events:
            wire.table.release(event.ticket_id)
        assert all(
            isinstance(event, TicketAborted) or event.ticket_id == ticket_id
            for event in wire.events
        )
        wire.events.clear()
    assert set(caught) == {damage.__name__ for damage in DAMAGES}
    assert harmless < NUM_DAMAGED // 100


@pytest.mark.parametrize("name", ["first_token", "num_tokens", "first_layer", "num_layers"])
def test_nothing_is_written_where_a_changed_header_says(name, monkeypatch):
    monkeypatch.setattr("kv_transfer.codec.MIN_VIEW_BYTES", 1)
    wire = Wire("float32", is_landing=True)
    ticket_id, epoch = wire.offer()
    parcel = wire.parcels(ticket_id, epoch)[0]
    setattr(parcel.header, name, getattr(parcel.header, name) ^ 4)
    wire.deliver(parcel.raw)
    assert not wire.blocks[list(BLOCKS)].any()
    assert [type(event) for event in wire.events] == [TicketAborted]


def test_a_connection_that_ends_within_a_payload_lets_the_blocks_go(monkeypatch):
    monkeypatch.setattr("kv_transfer.codec.MIN_VIEW_BYTES", 1)
    wire = Wire("float32", is_landing=True)
    parcels = wire.parcels(*wire.offer())
    (view,) = wire.session.land(parcels[0].header)
    view[0] = 1
    wire.table.abort_all("CANCELLED", "its owner gave it up")
    assert not wire.events, "a writer is in the blocks"
    wire.session.on_close("lost")
    assert [type(event) for event in wire.events] == [TicketAborted]


@pytest.mark.parametrize("trade", ["places", "payloads"])
def test_two_chunks_that_trade_are_no_kv(trade):
    wire = Wire("float32")
    ticket_id, epoch = wire.offer()
    parcels = wire.parcels(ticket_id, epoch)
    first, second = parcels[1], parcels[2]
    if trade == "payloads":
        first.payload, second.payload = second.payload, first.payload
        first.header.checksum, second.header.checksum = (
            second.header.checksum,
            first.header.checksum,
        )
    else:
        for name in ("first_token", "first_layer"):
            mine, other = getattr(first.header, name), getattr(second.header, name)
            setattr(first.header, name, other)
            setattr(second.header, name, mine)
    for parcel in parcels:
        wire.deliver(parcel.raw)
    wire.commit(ticket_id, epoch, parcels)
    assert [type(event) for event in wire.events] == [TicketAborted]


def test_undamaged_chunks_are_committed():
    wire = Wire("float32")
    ticket_id, epoch = wire.offer()
    parcels = wire.parcels(ticket_id, epoch)
    for parcel in parcels:
        wire.deliver(parcel.raw)
    wire.commit(ticket_id, epoch, parcels)
    assert isinstance(wire.events[0], TicketCommitted)
    assert wire.is_whole(parcels)


@pytest.mark.parametrize("field_name", ["num_tokens", "exposed_us", "ticket_id"])
def test_a_changed_commit_is_none(field_name):
    wire = Wire("float32")
    ticket_id, epoch = wire.offer()
    parcels = wire.parcels(ticket_id, epoch)
    for parcel in parcels:
        wire.deliver(parcel.raw)
    frame = kv_pb2.KvCommit(ticket_id=ticket_id, epoch=epoch, num_tokens=NUM_TOKENS)
    frame.first_tokens.add(token_id=1)
    total = sum(parcel.header.checksum for parcel in parcels)
    frame.checksum = commit_checksum(frame, total)
    frame.first_tokens[0].token_id = 2
    setattr(frame, field_name, getattr(frame, field_name) ^ 1)
    wire.session.on_frame(frame, memoryview(b""))
    assert not any(isinstance(event, TicketCommitted) for event in wire.events)


def test_a_changed_first_token_is_no_token():
    wire = Wire("float32")
    ticket_id, epoch = wire.offer()
    parcels = wire.parcels(ticket_id, epoch)
    for parcel in parcels:
        wire.deliver(parcel.raw)
    frame = kv_pb2.KvCommit(ticket_id=ticket_id, epoch=epoch, num_tokens=NUM_TOKENS)
    for token_id in (1, 5):
        frame.first_tokens.add(token_id=token_id)
    total = sum(parcel.header.checksum for parcel in parcels)
    frame.checksum = commit_checksum(frame, total)
    frame.first_tokens[1].token_id = 4
    wire.session.on_frame(frame, memoryview(b""))
    assert isinstance(wire.events[0], TicketAborted)

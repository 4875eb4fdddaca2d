"""Frames between workers that share a secret: what is not exactly the next one, as it was sent,
ends the connection."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import HandoffFailed
from baton.types import Sample
from baton.v1 import kv_pb2
from engine.kv.range import KvRange
from kv_transfer.frame import PREAMBLE_BYTES, Frame, FrameBuffer, FrameError, encode
from kv_transfer.kv_secret import SEAL_BYTES, KvSecret, receiver_seals, sender_seals
from kv_transfer.send_connection import Cancel, FetchPrefix, Finish, Send
from kv_transfer.ticket import PrefixRequested, TicketAborted, TicketCommitted
from kv_transfer.transport.tcp_stream import TcpConnection, TcpServerStream

SECRET = KvSecret(b"0123456789abcdef")
KEY, OTHER_KEY = b"k" * 32, b"o" * 32

FRAMES: st.SearchStrategy[Frame] = st.one_of(
    st.builds(kv_pb2.KvBegin, ticket=st.binary(max_size=30)),
    st.builds(kv_pb2.KvChunk, ticket_id=st.integers(0, 9), checksum=st.integers(0, 2**64 - 1)),
    st.builds(kv_pb2.KvCommit, ticket_id=st.integers(0, 9), num_tokens=st.integers(0, 9)),
    st.builds(kv_pb2.KvRenew, ticket_ids=st.lists(st.integers(0, 9), max_size=3)),
    st.builds(kv_pb2.KvFetchPrefix, ticket_id=st.integers(0, 9), deliver_to=st.binary(max_size=9)),
    st.builds(kv_pb2.KvAbort, ticket_id=st.integers(0, 9), message=st.text(max_size=9)),
    st.builds(kv_pb2.KvCommitted, ticket_id=st.integers(0, 9)),
    st.builds(kv_pb2.KvCredit, slots=st.lists(st.integers(0, 9), max_size=3)),
    st.builds(kv_pb2.KvLanded, slot=st.integers(0, 9)),
)


def sealed(frames: Sequence[Frame], key: bytes = KEY) -> list[bytes]:
    """As a sender writes them."""
    seal = sender_seals(key).outgoing
    return [encode(frame, seal=seal) for frame in frames]


def read(data: bytes) -> list[Frame]:
    """What the receiver takes of it, up to the first that it does not take."""
    buffer, taken = FrameBuffer(), list[Frame]()
    buffer.seal = receiver_seals(KEY).incoming
    try:
        for frame in buffer.feed(data):
            taken.append(frame)
    except FrameError:
        return taken
    assert sum(map(len, sealed(taken))) == len(data), "all is read, or refused"
    return taken


@given(st.lists(FRAMES, max_size=6))
def test_what_is_sent_arrives(frames: list[Frame]) -> None:
    assert read(b"".join(sealed(frames))) == frames


@given(st.lists(FRAMES, min_size=1, max_size=5), st.data())
def test_a_changed_bit_ends_it_there(frames: list[Frame], data: st.DataObject) -> None:
    pieces = sealed(frames)
    at = data.draw(st.integers(0, len(frames) - 1))
    # The header's length is left alone: more may have to come then, and nothing is taken until it
    # has.
    places = set(range(len(pieces[at]))) - set(range(8, 12))
    changed = bytearray(pieces[at])
    changed[data.draw(st.sampled_from(sorted(places)))] ^= 1 << data.draw(st.integers(0, 7))
    assert read(b"".join((*pieces[:at], bytes(changed), *pieces[at + 1 :]))) == frames[:at]


@given(st.lists(FRAMES, min_size=2, max_size=5), st.data())
def test_other_orders_end_it_there(frames: list[Frame], data: st.DataObject) -> None:
    pieces = sealed(frames)
    order = data.draw(st.lists(st.integers(0, len(frames) - 1), max_size=7))
    num_right = next(
        (at for at, number in enumerate(order) if number != at), min(len(order), len(frames))
    )
    assert read(b"".join(pieces[number] for number in order)) == frames[:num_right]


@pytest.mark.slow
@given(st.lists(FRAMES, min_size=1, max_size=5), st.data())
def test_frames_of_elsewhere_end_it_there(frames: list[Frame], data: st.DataObject) -> None:
    """The same frame at the same place, but of another connection, of the other direction, or of
    one without a secret."""
    at = data.draw(st.integers(0, len(frames) - 1))
    back = receiver_seals(KEY).outgoing
    for strange in (
        sealed(frames, OTHER_KEY),
        [encode(frame, seal=back) for frame in frames],
        [encode(frame) + bytes(SEAL_BYTES) for frame in frames],
    ):
        assert read(b"".join((*sealed(frames)[:at], strange[at]))) == frames[:at]


# The same on the wire: between real ends, by somebody who can do everything but compute digests.

Write = Callable[..., None]


class Meddler:
    """Changes what one end writes: the first frame of a kind, in one way. A write is a few frames,
    each with its payload, if it has one."""

    def __init__(self, kind: int, attack: str) -> None:
        self._kind = kind
        self._attack = attack
        self._kept: tuple[Any, ...] | None = None
        self.has_struck = False

    def patched(self, write: Write) -> Write:
        def meddle(end: Any, *pieces: Any) -> None:
            for frame in _frames_in(pieces):
                meddle_with(end, *frame)

        def meddle_with(end: Any, *pieces: Any) -> None:
            if self._kept:
                write(end, *pieces)
                write(end, *self._kept)
                self._kept = None
            elif self.has_struck or pieces[0][5] != self._kind:
                write(end, *pieces)
            else:
                self.has_struck = True
                self._strike(write, end, *pieces)

        return meddle

    def _strike(self, write: Write, end: Any, frame: bytes, *payload: Any) -> None:
        match self._attack:
            case "header":
                write(end, _flipped(frame, PREAMBLE_BYTES), *payload)
            case "digest":
                write(end, _flipped(frame, len(frame) - 1), *payload)
            case "repeat":
                write(end, frame, *payload, frame, *payload)
            case "delay":
                self._kept = (frame, *payload)
            case "drop":
                pass


def _frames_in(pieces: Sequence[Any]) -> Iterator[list[Any]]:
    """Header and payload of each frame of a write."""
    frame: list[Any] = []
    for piece in pieces:
        if isinstance(piece, bytes) and frame:
            yield frame
            frame = []
        frame.append(piece)
    yield frame


def _flipped(frame: bytes, at: int) -> bytes:
    changed = bytearray(frame)
    changed[at] ^= 4
    return bytes(changed)


BEGIN, CHUNK, COMMIT, RENEW, ABORT, COMMITTED, CREDIT, FETCH_PREFIX = range(4, 12)


def begin(rig: Any, *, is_heard: bool) -> None:
    """is_heard: wait until the receiver has taken it in."""
    rig.sender.begin("k", rig.offer((3, 1, 0, 7), 0, 11).data)
    rig.sender.submit(FetchPrefix("k", b"no ticket, for all that this end knows"))
    if is_heard:
        assert isinstance(rig.event(), PrefixRequested)


def hand_over(rig: Any, clock: list[float], *, is_heard: bool = False) -> Any:
    """A handoff with every frame that a sender has to say, of which KvRenew only if it is heard;
    its end there."""
    begin(rig, is_heard=is_heard)
    rig.sender.submit(Send("k", (5, 2, 9), KvRange(0, 4, 0, rig.source.layout.num_layers)))
    clock[0] += 11.0  # of the lease's 30 s
    rig.sender.heartbeat()
    rig.sender.submit(Send("k", (5, 2, 9), KvRange(4, 7, 0, rig.source.layout.num_layers)))
    rig.sender.submit(Finish("k", 11, (Sample(7),), clock[0]))
    return rig.done()


def end_of(rig: Any) -> TicketCommitted | TicketAborted:
    while not isinstance(event := rig.event(), TicketCommitted | TicketAborted):
        pass
    return event


def rig_of(make_rig: Any, clock: list[float], secret: KvSecret | None) -> Any:
    return make_rig(
        "tcp", clock=lambda: clock[0], source_secret=secret, target_secret=secret, num_credits=3
    )


@pytest.mark.parametrize("attack", ["header", "digest", "delay", "repeat", "drop"])
@pytest.mark.parametrize("kind", [BEGIN, CHUNK, RENEW, FETCH_PREFIX])
def test_a_sender_s_frame_that_is_meddled_with_ends_the_handoff(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch, kind: int, attack: str
) -> None:
    clock, meddler = [time.monotonic()], Meddler(kind, attack)
    monkeypatch.setattr(TcpConnection, "write", meddler.patched(TcpConnection.write))
    rig = rig_of(make_rig, clock, SECRET)
    done = hand_over(rig, clock, is_heard=kind == RENEW)
    assert meddler.has_struck
    assert isinstance(done.error, HandoffFailed)
    rig.running.close()
    assert isinstance(end_of(rig), TicketAborted)


@pytest.mark.parametrize("kind", [COMMIT, ABORT])
@pytest.mark.parametrize("attack", ["header", "digest"])
def test_a_last_word_that_is_changed_is_none(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch, kind: int, attack: str
) -> None:
    clock, meddler = [time.monotonic()], Meddler(kind, attack)
    monkeypatch.setattr(TcpConnection, "write", meddler.patched(TcpConnection.write))
    rig = rig_of(make_rig, clock, SECRET)
    if kind == COMMIT:
        hand_over(rig, clock)
    else:
        begin(rig, is_heard=True)
        rig.sender.submit(Cancel("k", "CANCELLED", "enough"))
    assert isinstance(end_of(rig), TicketAborted)
    assert meddler.has_struck


def test_a_commit_that_comes_twice_counts_once(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, meddler = [time.monotonic()], Meddler(COMMIT, "repeat")
    monkeypatch.setattr(TcpConnection, "write", meddler.patched(TcpConnection.write))
    rig = rig_of(make_rig, clock, SECRET)
    hand_over(rig, clock)
    assert isinstance(end_of(rig), TicketCommitted)
    rig.running.close()
    assert rig.events.empty()


@pytest.mark.parametrize(
    ("kind", "attack"),
    [
        *((CREDIT, attack) for attack in ("header", "digest", "repeat", "drop")),
        *((COMMITTED, attack) for attack in ("header", "digest")),
    ],
)
def test_a_receiver_s_frame_that_is_meddled_with_ends_the_connection(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch, kind: int, attack: str
) -> None:
    """A commit stands once the receiver has taken it: its word to the gateway counts, not what the
    sender hears of it."""
    clock, meddler = [time.monotonic()], Meddler(kind, attack)
    monkeypatch.setattr(TcpServerStream, "write", meddler.patched(TcpServerStream.write))
    rig = rig_of(make_rig, clock, SECRET)
    assert isinstance(hand_over(rig, clock).error, HandoffFailed)
    assert meddler.has_struck


@pytest.mark.parametrize("kind", [RENEW, FETCH_PREFIX])
def test_without_a_secret_a_repeated_frame_passes(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch, kind: int
) -> None:
    """So the attack above is one."""
    clock, meddler = [time.monotonic()], Meddler(kind, "repeat")
    monkeypatch.setattr(TcpConnection, "write", meddler.patched(TcpConnection.write))
    rig = rig_of(make_rig, clock, None)
    assert hand_over(rig, clock, is_heard=True).error is None
    assert meddler.has_struck
    assert isinstance(end_of(rig), TicketCommitted)

"""Frames come back as they went, and hostile bytes give a FrameError, or are a frame."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import InvalidRequest
from baton.v1 import kv_pb2
from kv_transfer.frame import (
    MAX_HEADER_BYTES,
    PREAMBLE_BYTES,
    FrameBuffer,
    FrameError,
    decode_header,
    decode_preamble,
    encode,
)
from kv_transfer.ticket import parse_ticket

quick = settings(deadline=None, database=None, max_examples=200)

FRAMES = st.one_of(
    st.builds(kv_pb2.KvHello, min_version=st.integers(0, 9), worker_id=st.text(max_size=9)),
    st.builds(kv_pb2.KvBegin, ticket=st.binary(max_size=40)),
    st.builds(
        kv_pb2.KvChunk,
        ticket_id=st.integers(0, 2**64 - 1),
        first_token=st.integers(0, 2**32 - 1),
        checksum=st.integers(0, 2**64 - 1),
    ),
    st.builds(kv_pb2.KvCredit, slots=st.lists(st.integers(0, 99), max_size=5)),
    st.builds(kv_pb2.KvRenew, ticket_ids=st.lists(st.integers(0, 2**64 - 1), max_size=5)),
    st.builds(kv_pb2.KvAbort, reason=st.text(max_size=9), message=st.text(max_size=9)),
)


@pytest.mark.slow
@quick
@given(st.lists(FRAMES, max_size=5), st.integers(1, 30))
def test_a_stream_is_cut_into_the_frames_it_was_made_of(frames, step):
    data = b"".join(encode(frame) for frame in frames)
    buffer, found = FrameBuffer(), []
    for at in range(0, len(data), step):
        found.extend(buffer.feed(data[at : at + step]))
    assert found == frames


@quick
@given(st.binary(min_size=PREAMBLE_BYTES, max_size=PREAMBLE_BYTES))
def test_random_preambles_are_refused(data):
    with pytest.raises(FrameError):
        decode_preamble(b"\0" + data[1:], 100)


@quick
@given(FRAMES, st.data())
def test_damaged_frames_give_a_frame_error_or_a_frame(frame, data):
    raw = bytearray(encode(frame))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(0, len(raw)))]
    try:
        preamble = decode_preamble(raw[:PREAMBLE_BYTES], 0)
        decode_header(preamble, raw[PREAMBLE_BYTES:])
        list(FrameBuffer().feed(bytes(raw)))
    except FrameError:
        return


def test_lengths_are_limited_before_anything_is_read():
    preamble = bytearray(encode(kv_pb2.KvCredit()))
    preamble[8:12] = (MAX_HEADER_BYTES + 1).to_bytes(4, "little")
    with pytest.raises(FrameError, match="header"):
        decode_preamble(preamble, 0)
    with pytest.raises(FrameError, match="payload"):
        decode_preamble(encode(kv_pb2.KvChunk(), 101)[:PREAMBLE_BYTES], 100)
    with pytest.raises(FrameError, match="too large"):
        encode(kv_pb2.KvBegin(ticket=bytes(MAX_HEADER_BYTES)))


@quick
@given(st.binary(max_size=200))
def test_garbage_is_no_ticket(data):
    with pytest.raises(InvalidRequest):
        parse_ticket(data)

"""KV arrives in a worker that keeps it in another type, over a wire of a third: as near as that
type allows."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import PeerMismatch
from baton.types import (
    CONVERTIBLE_DTYPES,
    DTYPE_BYTES,
    KEY_VALUE,
    LATENT,
    SCALED_DTYPES,
    KvLayout,
    Sample,
)
from baton.v1 import kv_pb2
from engine.kv.range import KvRange
from engine.kv.tensors.array import ArrayKvPool
from kv_transfer.codec import ChunkCodec
from kv_transfer.send_connection import Finish
from kv_transfer.ticket import TicketCommitted
from kv_transfer.transcoder import BITS, Transcoder, narrow, widen
from kv_transfer.wire_format import (
    WIRE_DTYPES,
    WireFormat,
    agreed_dtype,
    most_token_layer_bytes,
    wire_format,
)
from tests.support.kv_transports import ALL

quick = settings(deadline=None, database=None, max_examples=80)
POOL_DTYPES = sorted(CONVERTIBLE_DTYPES - SCALED_DTYPES)
ON_THE_WIRE = [dtype for dtype in WIRE_DTYPES if dtype != "auto"]
NUM_HEADS, HEAD_DIM = 2, 5
#: Half a step, relative to the element.
PRECISION = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11, "fp8": 2.0**-4, "int8": 0.0}
#: Half a step, relative to the largest of the head's elements of the run.
FLOOR = {"fp8": 2.0**-10 / 448, "int8": 0.5 / 127}


def layout_of(
    dtype: str, block_size: int = 4, num_layers: int = 3, parts: tuple[str, ...] = KEY_VALUE
) -> KvLayout:
    return KvLayout("m", num_layers, NUM_HEADS, HEAD_DIM, dtype, block_size, parts)


def filled_pool(layout: KvLayout, seed: int, num_blocks: int = 8) -> ArrayKvPool:
    """A pool with heads that differ in size by orders of magnitude."""
    pool, rng = ArrayKvPool(layout, num_blocks), np.random.default_rng(seed)
    values = rng.standard_normal(pool.data.shape).astype(np.float32)
    values *= 10.0 ** rng.integers(-3, 3, pool.data.shape[:4])[..., None, None]
    narrow(values, layout.dtype, pool.data, np.empty_like(values))
    return pool


def values_of(pool: ArrayKvPool) -> np.ndarray:
    out = np.empty(pool.data.shape, np.float32)
    widen(pool.data, pool.layout.dtype, out)
    return out


def tokens_of(pool: ArrayKvPool, table: tuple[int, ...], num_tokens: int) -> np.ndarray:
    """[tokens, layers, parts, heads, head_dim]."""
    return np.stack(
        [
            values_of(pool)[
                table[token // pool.layout.block_size], :, :, :, token % pool.layout.block_size
            ]
            for token in range(num_tokens)
        ]
    )


def bound_of(sent: np.ndarray, wire: str, target: str, block_size: int) -> np.ndarray:
    """How far off each of `sent` [tokens, layers, parts, heads, head_dim] may arrive."""
    peaks = np.empty_like(sent)
    for start in range(0, len(sent), block_size):
        run = sent[start : start + block_size]
        peaks[start : start + block_size] = np.abs(run).max(axis=(0, 4), keepdims=True)
    on_wire = np.maximum(np.abs(sent) * PRECISION[wire], peaks * FLOOR.get(wire, 0.0))
    # The least subnormal of float16 is the other half step; the rest is the rounding of the scales.
    in_pool = (np.abs(sent) + on_wire) * PRECISION[target]
    return (on_wire + in_pool) * 1.001 + 2.0**-24


@pytest.mark.parametrize(
    ("source", "wire", "target", "parts"),
    [
        *itertools.product(POOL_DTYPES, ON_THE_WIRE, POOL_DTYPES, [KEY_VALUE]),
        *itertools.product(["float32"], ON_THE_WIRE, ["bfloat16"], [LATENT]),
    ],
)
def test_any_type_arrives_as_any_other(source, wire, target, parts):
    ours = filled_pool(layout_of(source, parts=parts), 1)
    theirs = filled_pool(layout_of(target, 3, parts=parts), 2)
    before = theirs.data.copy()
    piece = KvRange(0, 10, 0, 3)
    format_ = wire_format(wire, ours.layout)
    payload = memoryview(bytearray(format_.num_bytes(piece)))
    tables = (5, 0, 2), (7, 1, 4, 6)
    ChunkCodec(ours, format_).pack(tables[0], piece, payload)
    ChunkCodec(theirs, format_).unpack(tables[1], piece, payload)
    sent, got = tokens_of(ours, tables[0], 10), tokens_of(theirs, tables[1], 10)
    assert (np.abs(got - sent) <= bound_of(sent, wire, target, 4)).all()
    untouched = [block for block in range(8) if block not in tables[1]]
    np.testing.assert_array_equal(theirs.data[untouched], before[untouched])


@pytest.mark.parametrize("dtype", POOL_DTYPES)
def test_the_pools_own_type_is_not_turned_into_anything(dtype):
    pool = filled_pool(layout_of(dtype), 1)
    codec = ChunkCodec(pool, wire_format(dtype, pool.layout))
    piece = KvRange(4, 8, 1, 2)
    payload = memoryview(bytearray(codec.wire.num_bytes(piece)))
    codec.pack((5, 2, 6), piece, payload)
    assert codec.is_plain
    assert bytes(payload) == pool.data[2, 1:3].tobytes() + pool.data[6, 1:3].tobytes()


@pytest.mark.parametrize("source", POOL_DTYPES)
@pytest.mark.parametrize("wire", sorted({"float32", *POOL_DTYPES}))
def test_a_wider_type_loses_nothing(source, wire):
    if DTYPE_BYTES[wire] <= DTYPE_BYTES[source] and wire != source:
        return
    pool = filled_pool(layout_of(source), 3)
    transcoder = Transcoder(source, wire_format(wire, pool.layout))
    run = memoryview(pool.data[0].tobytes())
    data = memoryview(bytearray(len(run) * DTYPE_BYTES[wire] // DTYPE_BYTES[source]))
    back = memoryview(bytearray(len(run)))
    transcoder.encode(run, 4, 3, data)
    transcoder.decode(data, 4, 3, back)
    assert back == run


@pytest.mark.parametrize("wire", sorted(SCALED_DTYPES))
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_never_becomes_a_number(wire, bad):
    format_ = WireFormat(wire, NUM_HEADS, HEAD_DIM, 4)
    values = np.ones((1, 2, NUM_HEADS, 4, HEAD_DIM), np.float32)
    values[0, 1, 0, 2, 3] = bad
    data = memoryview(bytearray(format_.num_bytes(KvRange(0, 4, 0, 1))))
    back = np.zeros_like(values)
    transcoder = Transcoder("float32", format_)
    transcoder.encode(memoryview(values.tobytes()), 4, 1, data)
    transcoder.decode(data, 4, 1, back.data.cast("B"))
    assert np.isnan(back[0, 1, 0]).all()
    back[0, 1, 0] = values[0, 1, 0] = 1
    np.testing.assert_array_equal(back, values)


@pytest.mark.parametrize("wire", sorted(SCALED_DTYPES))
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-30, 3e38])
def test_the_smallest_and_largest_values_survive(wire, size):
    format_ = WireFormat(wire, NUM_HEADS, HEAD_DIM, 4)
    values = np.full((1, 2, NUM_HEADS, 4, HEAD_DIM), size, np.float32)
    data = memoryview(bytearray(format_.num_bytes(KvRange(0, 4, 0, 1))))
    back = np.ones_like(values)
    transcoder = Transcoder("float32", format_)
    transcoder.encode(memoryview(values.tobytes()), 4, 1, data)
    transcoder.decode(data, 4, 1, back.data.cast("B"))
    np.testing.assert_allclose(back, values, rtol=1e-6, atol=2.0**-100)


@quick
@given(
    st.binary(min_size=64, max_size=64), st.sampled_from(ON_THE_WIRE), st.sampled_from(POOL_DTYPES)
)
def test_whatever_bytes_come_they_are_decoded_without_a_word(noise, wire, target):
    format_ = wire_format(wire, layout_of("float32"))
    piece = KvRange(0, 4, 0, 3)
    data = memoryview(bytearray((noise * 64)[: format_.num_bytes(piece)]))
    pool = ArrayKvPool(layout_of(target), 1)
    ChunkCodec(pool, format_).unpack((0,), piece, data)
    assert len(data) == format_.num_bytes(piece)


@quick
@given(st.integers(0, 50), st.integers(1, 50), st.integers(1, 20), st.sampled_from(ON_THE_WIRE))
def test_the_size_of_a_payload_is_that_of_its_runs(first, count, block_size, dtype):
    format_ = WireFormat(dtype, NUM_HEADS, HEAD_DIM, block_size)
    by_block = itertools.groupby(range(first, first + count), lambda token: token // block_size)
    runs = [list(tokens) for _, tokens in by_block]
    assert format_.num_bytes(KvRange(first, count, 0, 3)) == sum(
        format_.num_bytes(KvRange(run[0], len(run), 0, 3)) for run in runs
    )
    assert format_.num_bytes(KvRange(first, count, 0, 3)) <= 3 * count * format_.token_layer_bytes


@pytest.mark.parametrize("wire", sorted(SCALED_DTYPES))
@pytest.mark.parametrize(("head_dim", "block_size"), [(32, 16), (64, 16), (128, 16), (128, 32)])
def test_eight_bits_move_little_more_than_half_of_sixteen(wire, head_dim, block_size):
    layout = KvLayout("m", 7, 2, head_dim, "bfloat16", block_size)
    piece = KvRange(0, 1000, 0, 7)
    eight = wire_format(wire, layout).num_bytes(piece)
    assert eight <= 0.52 * wire_format("bfloat16", layout).num_bytes(piece)


def test_every_agreed_type_fits_the_smallest_staging():
    for dtype in ("int64", *CONVERTIBLE_DTYPES):
        layout = layout_of(dtype)
        for sender in ("int64",) if dtype == "int64" else CONVERTIBLE_DTYPES:
            for wanted in WIRE_DTYPES:
                agreed = agreed_dtype(sender, dtype, wanted)
                format_ = wire_format(agreed, layout_of(sender))
                assert format_.token_layer_bytes <= most_token_layer_bytes(layout)


def test_what_auto_takes_is_the_narrower_or_the_receivers():
    assert agreed_dtype("float32", "bfloat16", "auto") == "bfloat16"
    assert agreed_dtype("bfloat16", "float32", "auto") == "bfloat16"
    assert agreed_dtype("float16", "bfloat16", "auto") == "bfloat16"
    assert agreed_dtype("float32", "float32", "int8") == "int8"
    assert agreed_dtype("int64", "int64", "int8") == "int64"
    assert agreed_dtype("bfloat16", "int8", "auto") == "int8"
    assert agreed_dtype("int8", "float32", "auto") == "int8"
    assert agreed_dtype("int8", "fp8", "auto") == "fp8"


@pytest.mark.parametrize("dtype", ["int64", "int4", ""])
def test_a_type_that_is_none_is_refused(dtype):
    with pytest.raises(ValueError, match="cannot travel"):
        wire_format(dtype, layout_of("float32"))


@pytest.mark.parametrize("transport", ALL)
@pytest.mark.parametrize(
    ("source", "wanted", "target", "wire"),
    [
        ("float32", "auto", "bfloat16", "bfloat16"),
        ("bfloat16", "auto", "float32", "bfloat16"),
        ("bfloat16", "int8", "bfloat16", "int8"),
        ("float16", "fp8", "float32", "fp8"),
        ("bfloat16", "float32", "bfloat16", "float32"),
    ],
)
def test_a_handoff_between_unlike_tiers(make_rig, transport, source, wanted, target, wire):
    rig = make_rig(
        transport,
        source_layout=layout_of(source),
        target_layout=layout_of(target, 3),
        wire_dtype=wanted,
    )
    rig.source.data[...] = filled_pool(rig.source.layout, 4, 16).data
    ticket = rig.offer((9, 3, 11, 0), 2, 11)
    rig.sender.begin("k", ticket.data)
    rig.send_all("k", (7, 1, 2), 11)
    event = rig.event()
    assert isinstance(event, TicketCommitted)
    assert rig.done().error is None
    sent = tokens_of(rig.source, (7, 1, 2), 11)
    got = tokens_of(rig.target, (9, 3, 11, 0), 11)
    off = np.abs(got - sent)[2:]
    # The tokens before the second are not sent, so that the first run's largest may be less than
    # the block's.
    assert (off <= bound_of(sent, wire, target, 4)[2:]).all()
    plain_bytes = 9 * 3 * 2 * NUM_HEADS * HEAD_DIM * BITS.get(wire, np.dtype(np.int8)).itemsize
    assert event.num_bytes >= plain_bytes
    assert event.num_bytes == plain_bytes or wire in SCALED_DTYPES


@pytest.mark.parametrize("transport", ALL)
def test_what_is_no_number_travels_untouched(make_rig, transport):
    rig = make_rig(transport, wire_dtype="int8")
    ticket = rig.offer((0, 1), 0, 6)
    rig.sender.begin("k", ticket.data)
    rig.send_all("k", (2, 3), 6)
    assert isinstance(rig.event(), TicketCommitted)
    for token in range(6):
        np.testing.assert_array_equal(
            rig.token(rig.target, (0, 1), token), rig.token(rig.source, (2, 3), token)
        )


def test_blocks_of_another_type_are_not_lent(make_rig, monkeypatch):
    monkeypatch.setattr("kv_transfer.codec.MIN_VIEW_BYTES", 1)
    rig = make_rig("tcp", source_layout=layout_of("float32"), target_layout=layout_of("bfloat16"))
    rig.source.data[...] = 1.0
    rig.sender.begin("k", rig.offer((0, 1), 0, 8).data)
    rig.send_all("k", (2, 3), 8)
    assert isinstance(rig.event(), TicketCommitted)
    assert (values_of(rig.target)[:2] == 1.0).all()


def test_a_receiver_that_wants_what_nobody_knows_is_named(make_rig):
    rig = make_rig(
        "loopback", source_layout=layout_of("float32"), target_layout=layout_of("float32")
    )
    hear = rig.running.receiver.session

    def session(reply):
        def told(frame):
            if isinstance(frame, kv_pb2.KvAccept):
                frame.wire_dtype = "int4"
            reply(frame)

        return hear(told)

    rig.running.receiver.session = session
    rig.sender.begin("k", rig.offer((0,), 0, 3).data)
    rig.sender.submit(Finish("k", 3, (Sample(1),), time.monotonic()))
    error = rig.done().error
    assert isinstance(error, PeerMismatch)
    assert (error.metadata["field"], error.metadata["actual"]) == ("wire_dtype", "int4")

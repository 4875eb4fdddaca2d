"""A payload holds the sender's blocks as they lie in its pool, and lands in whatever blocks the
receiver has."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.types import KEY_VALUE, LATENT, KvLayout
from engine.kv.range import KvRange
from engine.kv.tensors.array import ArrayKvPool
from kv_transfer.codec import ChunkCodec
from kv_transfer.wire_format import wire_format

quick = settings(deadline=None, database=None, max_examples=80)
NUM_LAYERS, NUM_BLOCKS = 4, 12


def pool_of(block_size: int, parts: tuple[str, ...] = KEY_VALUE) -> ArrayKvPool:
    pool = ArrayKvPool(KvLayout("m", NUM_LAYERS, 2, 3, "int64", block_size, parts), NUM_BLOCKS)
    pool.data[...] = np.arange(pool.data.size).reshape(pool.data.shape)
    return pool


def codec_of(pool: ArrayKvPool, sender: ArrayKvPool) -> ChunkCodec:
    return ChunkCodec(pool, wire_format("int64", sender.layout))


def buffer_of(pool: ArrayKvPool, piece: KvRange) -> memoryview:
    return memoryview(bytearray(piece.num_bytes(pool.layout.token_layer_bytes)))


@quick
@given(st.data())
def test_what_is_packed_from_blocks_of_one_size_lands_in_blocks_of_another(data):
    parts = data.draw(st.sampled_from([KEY_VALUE, LATENT]))
    source, target = (pool_of(data.draw(st.integers(1, 7)), parts) for _ in range(2))
    room = min(source.layout.block_size, target.layout.block_size) * NUM_BLOCKS
    first = data.draw(st.integers(0, room - 1))
    layer = data.draw(st.integers(0, NUM_LAYERS - 1))
    piece = KvRange(
        first,
        data.draw(st.integers(1, room - first)),
        layer,
        data.draw(st.integers(1, NUM_LAYERS - layer)),
    )
    tables = [tuple(data.draw(st.permutations(range(NUM_BLOCKS)))) for _ in range(2)]
    target.data[...] = -1
    expected = target.data.copy()
    layers = slice(piece.first_layer, piece.end_layer)
    for token in range(piece.first_token, piece.end_token):
        (s, i), (t, j) = (divmod(token, p.layout.block_size) for p in (source, target))
        expected[tables[1][t], layers, :, :, j] = source.data[tables[0][s], layers, :, :, i]
    wire = buffer_of(source, piece)
    codec_of(source, source).pack(tables[0], piece, wire)
    codec_of(target, source).unpack(tables[1], piece, wire)
    np.testing.assert_array_equal(target.data, expected)


def test_whole_blocks_travel_as_they_lie_in_the_pool():
    pool, table = pool_of(4), (5, 2, 9)
    piece = KvRange(4, 8, 1, 2)
    wire = buffer_of(pool, piece)
    codec_of(pool, pool).pack(table, piece, wire)
    assert bytes(wire) == pool.data[2, 1:3].tobytes() + pool.data[9, 1:3].tobytes()


def test_lent_blocks_are_the_payload_without_a_copy(monkeypatch):
    monkeypatch.setattr("kv_transfer.codec.MIN_VIEW_BYTES", 1)
    pool, table = pool_of(4), (5, 2, 9)
    piece = KvRange(4, 8, 1, 2)
    wire = buffer_of(pool, piece)
    codec_of(pool, pool).pack(table, piece, wire)
    lent = codec_of(pool, pool).views(table, piece)
    assert b"".join(lent) == bytes(wire)
    pool.data[2, 1] = 0
    assert b"".join(lent) != bytes(wire)


@pytest.mark.parametrize("piece", [KvRange(1, 7, 0, 4), KvRange(0, 7, 0, 4)])
def test_parts_of_blocks_are_not_lent(monkeypatch, piece):
    monkeypatch.setattr("kv_transfer.codec.MIN_VIEW_BYTES", 1)
    pool = pool_of(4)
    assert codec_of(pool, pool).views((5, 2), piece) == ()


def test_short_pieces_are_not_lent():
    pool = pool_of(4)
    assert codec_of(pool, pool).views((5, 2), KvRange(0, 8, 0, 4)) == ()


def test_only_blocks_and_layers_that_are_there_are_lent(monkeypatch):
    monkeypatch.setattr("kv_transfer.codec.MIN_VIEW_BYTES", 1)
    pool = pool_of(4)
    for table, piece in [
        ((5,), KvRange(0, 8, 0, 1)),
        ((NUM_BLOCKS,), KvRange(0, 4, 0, 1)),
        ((-1,), KvRange(0, 4, 0, 1)),
        ((5,), KvRange(0, 4, 3, 2)),
    ]:
        with pytest.raises(ValueError, match=r"block|layers"):
            codec_of(pool, pool).views(table, piece)


def test_a_buffer_of_another_size_is_refused():
    pool, piece = pool_of(4), KvRange(0, 4, 0, 1)
    short = buffer_of(pool, piece)[8:]
    with pytest.raises(ValueError, match="bytes for"):
        codec_of(pool, pool).pack((0,), piece, short)
    with pytest.raises(ValueError, match="bytes for"):
        codec_of(pool, pool).unpack((0,), piece, short)


def test_tokens_past_the_blocks_are_refused():
    pool, piece = pool_of(4), KvRange(3, 4, 0, 1)
    with pytest.raises(ValueError, match="tokens"):
        codec_of(pool, pool).pack((0,), piece, buffer_of(pool, piece))

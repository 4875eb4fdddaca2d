"""The torch engine's pool takes part in handoffs between unlike types as the numpy one does."""

from __future__ import annotations

import pytest
import torch
import xxhash

from baton.types import KvLayout
from engine.kv.range import KvRange
from engine.kv.tensors.paged import TorchKvPool
from kv_transfer.codec import ChunkCodec
from kv_transfer.wire_format import wire_format


def pool_of(dtype: str, block_size: int) -> TorchKvPool:
    layout = KvLayout("m", 3, 2, 8, dtype, block_size)
    return TorchKvPool(layout, 4, torch.device("cpu"))


@pytest.mark.parametrize(
    ("source", "wire", "target", "tolerance"),
    [
        ("float32", "bfloat16", "bfloat16", 2.0**-7),
        ("bfloat16", "bfloat16", "float32", 0.0),
        ("bfloat16", "int8", "float32", 0.03),
        ("float16", "fp8", "bfloat16", 0.5),
    ],
)
def test_a_tensor_arrives_as_another(source, wire, target, tolerance):
    ours, theirs = pool_of(source, 4), pool_of(target, 5)
    values = torch.randn(ours.tensor.shape, generator=torch.Generator().manual_seed(0)).clamp(-3, 3)
    ours.tensor.copy_(values)
    piece = KvRange(1, 10, 0, 3)
    format_ = wire_format(wire, ours.layout)
    payload = memoryview(bytearray(format_.num_bytes(piece)))
    ChunkCodec(ours, format_).pack((2, 0, 3), piece, payload)
    ChunkCodec(theirs, format_).unpack((1, 3, 0), piece, payload)
    for token in range(1, 11):
        sent = ours.tensor[(2, 0, 3)[token // 4], :, :, :, token % 4].float()
        got = theirs.tensor[(1, 3, 0)[token // 5], :, :, :, token % 5].float()
        torch.testing.assert_close(got, sent, rtol=0, atol=tolerance)


@pytest.mark.parametrize("piece", [KvRange(0, 12, 0, 3), KvRange(4, 8, 1, 2), KvRange(5, 6, 0, 3)])
def test_checked_copies_are_plain_ones(piece):
    ours, theirs = pool_of("float32", 4), pool_of("float32", 4)
    ours.tensor.copy_(torch.randn(ours.tensor.shape, generator=torch.Generator().manual_seed(0)))
    codec, back = (ChunkCodec(pool, wire_format("float32", ours.layout)) for pool in (ours, theirs))
    plain, checked = (memoryview(bytearray(codec.wire.num_bytes(piece))) for _ in range(2))
    codec.pack((2, 0, 3), piece, plain)
    checksum = codec.pack_checked((2, 0, 3), piece, checked, seed=5)
    assert checked == plain
    assert checksum == xxhash.xxh3_64_intdigest(plain, 5)
    assert back.unpack_checked((2, 0, 3), piece, checked, 5, checksum)
    again = memoryview(bytearray(codec.wire.num_bytes(piece)))
    back.pack((2, 0, 3), piece, again)
    assert again == plain
    checked[3] ^= 1
    assert not back.unpack_checked((2, 0, 3), piece, checked, 5, checksum)


def test_blocks_that_are_not_there_are_neither_read_nor_written():
    pool = pool_of("float32", 4)
    codec = ChunkCodec(pool, wire_format("float32", pool.layout))
    for table, piece in [((5,), KvRange(0, 4, 0, 3)), ((1,), KvRange(0, 8, 0, 3))]:
        payload = memoryview(bytearray(codec.wire.num_bytes(piece)))
        with pytest.raises(ValueError, match="block"):
            codec.pack_checked(table, piece, payload, 0)
        checksum = xxhash.xxh3_64_intdigest(payload, 0)
        with pytest.raises(ValueError, match="block"):
            codec.unpack_checked(table, piece, payload, 0, checksum)

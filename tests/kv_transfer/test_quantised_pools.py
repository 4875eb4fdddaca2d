"""KV of a pool of 8 bits: it travels to its like as it lies, and to every other as near as both
types allow."""

from __future__ import annotations

import itertools

import pytest
import torch

from baton.types import CONVERTIBLE_DTYPES, SCALED_DTYPES, KvLayout
from baton_kernels.kv_write import kv_write, slot_rows
from baton_kernels.quantize_rows import dequantize_rows
from engine.kv.range import KvRange
from engine.kv.tensors.paged import TorchKvPool
from kv_transfer.codec import ChunkCodec
from kv_transfer.wire_format import WIRE_DTYPES, wire_format

NUM_LAYERS, NUM_HEADS, HEAD_DIM, NUM_BLOCKS, NUM_TOKENS = 3, 2, 8, 6, 11
DTYPES = sorted(CONVERTIBLE_DTYPES)
ON_THE_WIRE = [dtype for dtype in WIRE_DTYPES if dtype != "auto"]
PIECE = KvRange(0, NUM_TOKENS, 0, NUM_LAYERS)
SENT, RECEIVED = (4, 0, 2), (5, 1, 3, 0)
#: Half a step: relative to the element, and to the largest of its scale.
STEPS = {
    "float32": (0.0, 0.0),
    "bfloat16": (2.0**-8, 0.0),
    "float16": (2.0**-11, 2.0**-24),
    "fp8": (2.0**-4, 2.0**-10 / 448),
    "int8": (0.0, 0.5 / 127),
}


def pool_of(dtype: str, block_size: int) -> TorchKvPool:
    layout = KvLayout("m", NUM_LAYERS, NUM_HEADS, HEAD_DIM, dtype, block_size)
    return TorchKvPool(layout, NUM_BLOCKS, torch.device("cpu"))


def fill(kv: TorchKvPool, table: tuple[int, ...]) -> None:
    """Tokens with heads that differ in size by orders of magnitude."""
    generator = torch.Generator().manual_seed(0)
    slots = torch.tensor([table[t // 4] * 4 + t % 4 for t in range(NUM_TOKENS)])
    rows = slot_rows(slots, kv.tensor)
    for layer in range(NUM_LAYERS):
        shape = (2, NUM_TOKENS, NUM_HEADS, HEAD_DIM)
        size = 10.0 ** torch.randint(-3, 3, shape[:3], generator=generator)
        key, value = torch.randn(shape, generator=generator) * size[..., None]
        kv_write(kv.tensor, layer, rows, key, value, kv.scales)


def tokens_of(kv: TorchKvPool, table: tuple[int, ...]) -> torch.Tensor:
    """[tokens, layers, 2, heads, head_dim]."""
    size = kv.layout.block_size
    found = []
    for t in range(NUM_TOKENS):
        at = (table[t // size], slice(None), slice(None), slice(None), t % size)
        row = kv.tensor[at]
        scales = None if kv.scales is None else kv.scales[at]
        found.append(row.float() if scales is None else dequantize_rows(row, scales, torch.float32))
    return torch.stack(found)


def hand_over(ours: TorchKvPool, theirs: TorchKvPool, wire: str) -> None:
    format_ = wire_format(wire, ours.layout)
    payload = memoryview(bytearray(format_.num_bytes(PIECE)))
    ChunkCodec(ours, format_).pack(SENT, PIECE, payload)
    ChunkCodec(theirs, format_).unpack(RECEIVED, PIECE, payload)


@pytest.mark.parametrize(
    ("source", "wire", "target"),
    [
        (source, wire, target)
        for source, wire, target in itertools.product(DTYPES, ON_THE_WIRE, DTYPES)
        if {source, target} & SCALED_DTYPES
    ],
)
def test_every_pool_hands_over_to_every_other(source: str, wire: str, target: str) -> None:
    ours, theirs = pool_of(source, 4), pool_of(target, 3)
    fill(ours, SENT)
    hand_over(ours, theirs, wire)
    sent, got = tokens_of(ours, SENT), tokens_of(theirs, RECEIVED)
    # A scale of the wire may be that of all tokens of a block.
    peaks = torch.cat([p.abs().amax((0, 4), keepdim=True).expand_as(p) for p in sent.split(4)])
    relative, floor = STEPS[wire]
    on_wire = sent.abs() * relative + peaks * floor
    relative, floor = STEPS[target]
    most = sent.abs() + on_wire
    bound = on_wire + most * relative + most.amax(-1, keepdim=True) * floor
    assert ((got - sent).abs() <= bound * 1.001 + 2.0**-24).all()


@pytest.mark.parametrize("block_size", [4, 3])
@pytest.mark.parametrize("dtype", sorted(SCALED_DTYPES))
def test_the_same_type_arrives_to_the_bit(dtype: str, block_size: int) -> None:
    ours, theirs = pool_of(dtype, 4), pool_of(dtype, block_size)
    fill(ours, SENT)
    hand_over(ours, theirs, dtype)
    assert torch.equal(tokens_of(theirs, RECEIVED), tokens_of(ours, SENT))
    format_ = wire_format(dtype, ours.layout)
    assert format_.num_bytes(PIECE) == NUM_TOKENS * ours.layout.token_bytes
    assert ChunkCodec(ours, format_).is_plain
    assert ChunkCodec(theirs, format_).is_plain


@pytest.mark.parametrize("dtype", sorted(SCALED_DTYPES))
def test_whole_blocks_travel_from_where_they_lie(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_transfer.codec.MIN_VIEW_BYTES", 1)
    kv = pool_of(dtype, 4)
    fill(kv, SENT)
    piece = KvRange(0, 8, 1, 2)
    codec = ChunkCodec(kv, wire_format(dtype, kv.layout))
    payload = bytearray(codec.wire.num_bytes(piece))
    codec.pack(SENT, piece, memoryview(payload))
    assert b"".join(codec.views(SENT, piece)) == payload


@pytest.mark.parametrize("dtype", sorted(SCALED_DTYPES))
def test_whole_blocks_are_copied_and_hashed_at_once(dtype: str) -> None:
    ours, theirs = pool_of(dtype, 4), pool_of(dtype, 4)
    fill(ours, SENT)
    piece = KvRange(0, 8, 0, NUM_LAYERS)
    format_ = wire_format(dtype, ours.layout)
    payload = memoryview(bytearray(format_.num_bytes(piece)))
    checksum = ChunkCodec(ours, format_).pack_checked(SENT, piece, payload, 7)
    plain = bytearray(len(payload))
    ChunkCodec(ours, format_).pack(SENT, piece, memoryview(plain))
    assert payload == plain
    assert ChunkCodec(theirs, format_).unpack_checked(RECEIVED, piece, payload, 7, checksum)
    assert torch.equal(tokens_of(theirs, RECEIVED)[:8], tokens_of(ours, SENT)[:8])


@pytest.mark.parametrize("wire", ON_THE_WIRE)
@pytest.mark.parametrize("source", sorted(SCALED_DTYPES))
def test_what_is_not_finite_never_becomes_a_number(source: str, wire: str) -> None:
    ours, theirs = pool_of(source, 4), pool_of("bfloat16", 4)
    key = torch.ones(1, NUM_HEADS, HEAD_DIM)
    key[0, 0, 3] = torch.inf
    rows = slot_rows(torch.tensor([SENT[0] * 4]), ours.tensor)
    kv_write(ours.tensor, 0, rows, key, torch.ones_like(key), ours.scales)
    hand_over(ours, theirs, wire)
    got = tokens_of(theirs, RECEIVED)[0, 0]
    assert got[0, 0].isnan().all()
    torch.testing.assert_close(got[1], torch.ones(NUM_HEADS, HEAD_DIM))

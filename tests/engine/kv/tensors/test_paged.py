"""Packing moves exactly the named tokens' bits, between pools of any two block sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.types import KEY_VALUE, LATENT, KvLayout
from engine.kv.range import KvRange
from engine.kv.tensors.paged import TorchKvPool

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 3, 2, 4


PARTS = (KEY_VALUE, LATENT)
#: In 8 bits, a row's scale lies behind the rows of its block and head.
DTYPES = ["float32", "bfloat16", "float16", "int8", "fp8"]


def pool(
    block_size: int, num_blocks: int, dtype: str, parts: tuple[str, ...] = KEY_VALUE
) -> TorchKvPool:
    layout = KvLayout("f", NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, dtype, block_size, parts)
    return TorchKvPool(layout, num_blocks, torch.device("cpu"))


def rows_of(kv: TorchKvPool) -> torch.Tensor:
    """Each row's bytes, and those of its scale: [blocks, layers, parts, kv_heads, block_size,
    bytes]."""
    parts = [kv.tensor] if kv.scales is None else [kv.tensor, kv.scales[..., None]]
    return torch.cat([part.view(torch.uint8) for part in parts], -1)


def randomise(kv: TorchKvPool) -> torch.Tensor:
    """Fill the pool with bytes; returns its rows_of."""
    for part in (kv.tensor, *(() if kv.scales is None else (kv.scales[..., None],))):
        view = part.view(torch.uint8)
        view.copy_(torch.randint(0, 256, view.shape, dtype=torch.uint8))
    return rows_of(kv)


@settings(deadline=None)
@given(data=st.data())
def test_a_range_moves_between_pools(data: st.DataObject) -> None:
    dtype, parts = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(PARTS))
    sizes = data.draw(st.tuples(st.integers(1, 7), st.integers(1, 7)))
    num_tokens = data.draw(st.integers(1, 20))
    first = data.draw(st.integers(0, num_tokens - 1))
    count = data.draw(st.integers(1, num_tokens - first))
    first_layer = data.draw(st.integers(0, NUM_LAYERS - 1))
    layers = data.draw(st.integers(1, NUM_LAYERS - first_layer))
    pools, tables = [], []
    for size in sizes:
        num_blocks = -(-num_tokens // size)
        pools.append(pool(size, num_blocks + 2, dtype, parts))
        tables.append(data.draw(st.permutations(range(num_blocks + 2)))[:num_blocks])
    source, target = pools
    bits = randomise(source)

    wire = bytearray(count * layers * source.layout.token_layer_bytes)
    piece = KvRange(first, count, first_layer, layers)
    source.pack(tables[0], piece, memoryview(wire))
    target.unpack(tables[1], piece, memoryview(bytes(wire)))

    wanted = torch.zeros_like(rows_of(target))
    for position in range(first, first + count):
        block, offset = tables[0][position // sizes[0]], position % sizes[0]
        here, at = tables[1][position // sizes[1]], position % sizes[1]
        for layer in range(first_layer, first_layer + layers):
            wanted[here, layer, :, :, at] = bits[block, layer, :, :, offset]
    assert torch.equal(rows_of(target), wanted)
    packed = torch.frombuffer(wire, dtype=torch.uint8).view(layers, len(parts), NUM_KV_HEADS, -1)
    num_row_bytes = source.tensor[0, 0, 0, 0, 0].view(torch.uint8).numel()
    block, offset = tables[0][first // sizes[0]], first % sizes[0]
    row = bits[block, first_layer, -1, 1, offset]
    assert torch.equal(packed[0, -1, 1, :num_row_bytes], row[:num_row_bytes])
    if source.scales is not None:
        assert torch.equal(packed[0, -1, 1, count * num_row_bytes :][:4], row[num_row_bytes:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_whole_block_is_lent_as_it_is_packed(dtype: str) -> None:
    kv = pool(4, 3, dtype)
    randomise(kv)
    wire = bytearray(2 * 4 * kv.layout.token_layer_bytes)
    kv.pack((2,), KvRange(0, 4, 1, 2), memoryview(wire))
    assert kv.block_view(2, 1, 2) == wire


@pytest.mark.parametrize("dtype", DTYPES)
def test_copied_blocks_are_whole(dtype: str) -> None:
    kv = pool(4, 5, dtype)
    before = randomise(kv)
    kv.copy_blocks([3, 0], [1, 4])
    assert torch.equal(rows_of(kv), before[[0, 3, 2, 3, 0]])


def test_scales_that_would_lie_askew_are_refused() -> None:
    layout = KvLayout("f", 1, 1, 6, "int8", 5)
    with pytest.raises(ValueError, match="30 is no multiple of 4"):
        TorchKvPool(layout, 1, torch.device("cpu"))


@pytest.mark.parametrize(
    ("block_ids", "piece", "extra"),
    [
        ((0, 1), KvRange(0, 9, 0, 3), 0),
        ((0, 1), KvRange(-1, 2, 0, 3), 0),
        ((0, 1), KvRange(0, 4, 1, 3), 0),
        ((0, 1), KvRange(0, 4, -1, 3), 0),
        ((0, 9), KvRange(0, 4, 0, 3), 0),
        ((0, -1), KvRange(0, 4, 0, 3), 0),
        ((0, 1), KvRange(0, 4, 0, 3), 4),
        ((0, 1), KvRange(0, 4, 0, 3), -4),
    ],
)
def test_wrong_ranges_and_sizes_are_refused_and_nothing_is_written(
    block_ids: tuple[int, ...], piece: KvRange, extra: int
) -> None:
    kv = pool(4, 3, "float32")
    size = piece.num_bytes(kv.layout.token_layer_bytes) + extra
    data = memoryview(bytearray(b"\1" * size))
    with pytest.raises(ValueError, match=r"\w"):
        kv.unpack(block_ids, piece, data)
    with pytest.raises(ValueError, match=r"\w"):
        kv.pack(block_ids, piece, data)
    assert not kv.tensor.any()
    assert bytes(data) == b"\1" * size


def test_packing_into_read_only_memory_is_refused() -> None:
    kv = pool(4, 1, "float32")
    with pytest.raises(ValueError, match="read-only"):
        kv.pack((0,), KvRange(0, 1, 0, 1), memoryview(bytes(kv.layout.token_layer_bytes)))

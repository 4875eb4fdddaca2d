"""Packing moves exactly the named tokens' bits, between pools of any two block sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.torch_kv_pool import TorchKvPool
from baton.types import KvLayout

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 3, 2, 4


def pool(block_size: int, num_blocks: int, dtype: str) -> TorchKvPool:
    layout = KvLayout("f", NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, dtype, block_size)
    return TorchKvPool(layout, num_blocks, torch.device("cpu"))


@settings(deadline=None)
@given(data=st.data())
def test_a_range_moves_between_pools(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(["float32", "bfloat16", "float16"]))
    sizes = data.draw(st.tuples(st.integers(1, 7), st.integers(1, 7)))
    num_tokens = data.draw(st.integers(1, 20))
    first = data.draw(st.integers(0, num_tokens - 1))
    count = data.draw(st.integers(1, num_tokens - first))
    first_layer = data.draw(st.integers(0, NUM_LAYERS - 1))
    layers = data.draw(st.integers(1, NUM_LAYERS - first_layer))
    pools, tables = [], []
    for size in sizes:
        num_blocks = -(-num_tokens // size)
        pools.append(pool(size, num_blocks + 2, dtype))
        tables.append(data.draw(st.permutations(range(num_blocks + 2)))[:num_blocks])
    source, target = pools
    bits = torch.randint(0, 256, source.tensor.view(torch.uint8).shape, dtype=torch.uint8)
    source.tensor.view(torch.uint8).copy_(bits)

    wire = bytearray(count * layers * source.layout.token_layer_bytes)
    source.pack(tables[0], first, count, first_layer, layers, memoryview(wire))
    target.unpack(tables[1], first, count, first_layer, layers, memoryview(bytes(wire)))

    wanted = torch.zeros_like(target.tensor).view(torch.uint8)
    for position in range(first, first + count):
        block, offset = tables[0][position // sizes[0]], position % sizes[0]
        here, at = tables[1][position // sizes[1]], position % sizes[1]
        for layer in range(first_layer, first_layer + layers):
            wanted[here, layer, :, :, at] = bits[block, layer, :, :, offset]
    assert torch.equal(target.tensor.view(torch.uint8), wanted)
    packed = torch.frombuffer(wire, dtype=torch.uint8).view(layers, 2, NUM_KV_HEADS, count, -1)
    block, offset = tables[0][first // sizes[0]], first % sizes[0]
    assert torch.equal(packed[0, 1, 1, 0], bits[block, first_layer, 1, 1, offset])


@pytest.mark.parametrize(
    ("block_ids", "first_token", "num_tokens", "first_layer", "num_layers", "extra"),
    [
        ((0, 1), 0, 9, 0, 3, 0),
        ((0, 1), -1, 2, 0, 3, 0),
        ((0, 1), 0, 4, 1, 3, 0),
        ((0, 9), 0, 4, 0, 3, 0),
        ((0, -1), 0, 4, 0, 3, 0),
        ((0, 1), 0, 4, 0, 3, 4),
        ((0, 1), 0, 4, 0, 3, -4),
    ],
)
def test_wrong_ranges_and_sizes_are_refused_and_nothing_is_written(
    block_ids: tuple[int, ...],
    first_token: int,
    num_tokens: int,
    first_layer: int,
    num_layers: int,
    extra: int,
) -> None:
    kv = pool(4, 3, "float32")
    size = num_tokens * num_layers * kv.layout.token_layer_bytes + extra
    data = memoryview(bytearray(b"\1" * size))
    arguments = (block_ids, first_token, num_tokens, first_layer, num_layers, data)
    with pytest.raises(ValueError, match=r"\w"):
        kv.unpack(*arguments)
    with pytest.raises(ValueError, match=r"\w"):
        kv.pack(*arguments)
    assert not kv.tensor.any()
    assert bytes(data) == b"\1" * size


def test_packing_into_read_only_memory_is_refused() -> None:
    kv = pool(4, 1, "float32")
    with pytest.raises(ValueError, match="read-only"):
        kv.pack((0,), 0, 1, 0, 1, memoryview(bytes(kv.layout.token_layer_bytes)))

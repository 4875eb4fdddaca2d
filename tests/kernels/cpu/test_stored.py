"""Native code writes every pool as the twin does, to the bit, and computes over one as over the
numbers that the twin reads."""

from __future__ import annotations

import pytest
import torch

from baton.types import KvLayout
from baton_kernels.cpu.paged_attention import AttentionPlan
from baton_kernels.kv_write import kv_write, slot_rows
from baton_kernels.paged_attention import AttentionSlice, paged_attention, plan_attention
from baton_kernels.quantize_rows import dequantize_rows
from baton_kernels.rope_kv_write import rope_kv_write
from engine.kv.tensors.paged import TorchKvPool

COMPUTED = [torch.float32, torch.bfloat16, torch.float16]
STORED = ["float32", "bfloat16", "float16", "int8", "fp8"]
LAYER = 1


def pool_of(dtype: str, num_blocks: int, kv_heads: int, block_size: int, dim: int) -> TorchKvPool:
    layout = KvLayout("m", 2, kv_heads, dim, dtype, block_size)
    kv = TorchKvPool(layout, num_blocks, torch.device("cpu"))
    kv.tensor.view(torch.uint8).fill_(255)
    return kv


def bits(kv: TorchKvPool) -> list[torch.Tensor]:
    parts = [kv.tensor] if kv.scales is None else [kv.tensor, kv.scales[..., None]]
    return [part.contiguous().view(torch.uint8) for part in parts]


def vectors(num_tokens: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Vectors of all sizes, with zeros, ties, subnormal numbers, infinities and NaN."""
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, heads, dim, generator=generator)
    x *= 10.0 ** torch.randint(-9, 5, (num_tokens, heads, 1), generator=generator)
    x[0] = 0
    # Halves and the borders of fp8's steps, told as multiples of a scale of one.
    x[1, 0] = torch.arange(dim) * 0.5 - 17
    x[1, 0, 0] = 127
    x[2, 0] = 2.0 ** -torch.arange(dim).float()
    x[2, 0, 0] = 448
    x[3, 0, 1], x[4, 0, dim - 1], x[5, 0, 0] = torch.nan, torch.inf, -torch.inf
    x[6, 0] = 1e-42
    return x.to(dtype)


@pytest.mark.parametrize("dtype", COMPUTED)
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(("kv_heads", "dim", "block_size"), [(1, 32, 5), (3, 20, 16), (2, 72, 1)])
def test_a_pool_is_written_as_the_twin_writes_it(
    stored: str, dtype: torch.dtype, kv_heads: int, dim: int, block_size: int
) -> None:
    num_tokens = 40
    key, value = (vectors(num_tokens + i, kv_heads, dim, dtype)[:num_tokens] for i in range(2))
    # Not turned: what is written is what was given, but for the sign of zero.
    cos, sin = torch.ones(num_tokens, dim // 2, dtype=dtype), torch.zeros(num_tokens, dim // 2)
    pools = [pool_of(stored, -(-50 // block_size), kv_heads, block_size, dim) for _ in range(2)]
    slots = torch.randperm(50, generator=torch.Generator().manual_seed(0))[:num_tokens]
    rows = slot_rows(slots, pools[0].tensor)
    _, turned = rope_kv_write(
        key, key, value, cos, sin.to(dtype), pools[0].tensor, LAYER, rows, pools[0].scales
    )
    kv_write.twin(pools[1].tensor, LAYER, rows, turned, value, pools[1].scales)
    got, wanted = (tuple(bits(kv)) for kv in pools)
    if stored in ("int8", "fp8"):
        assert all(map(torch.equal, got, wanted))
        return
    numbers, others = (kv.tensor.float() for kv in pools)
    torch.testing.assert_close(numbers, others, rtol=0, atol=1e-38, equal_nan=True)


@pytest.mark.parametrize("code", ["int8", "fp8"])
def test_every_code_is_read_as_the_twin_reads_it(code: str) -> None:
    """A query of zeros weighs one key with 1: the result is its value."""
    kv = pool_of(code, 8, 1, 1, 32)
    kv.tensor[:, LAYER, 1, 0, 0] = (
        torch.arange(256).to(torch.uint8).view(8, 32).view(kv.tensor.dtype)
    )
    kv.tensor[:, LAYER, 0] = torch.zeros(8, 1, 1, 32).to(kv.tensor.dtype)
    assert kv.scales is not None
    kv.scales.fill_(0.75)
    slices = [AttentionSlice(i, 1, 0, [i]) for i in range(8)]
    query = torch.zeros(8, 1, 32)
    plan = plan_attention(slices, kv.tensor, 1, 1.0, None, query.dtype)
    assert isinstance(plan, AttentionPlan)
    got = paged_attention(query, query, query, kv.tensor, LAYER, plan, kv.scales)
    wanted = dequantize_rows(kv.tensor[:, LAYER, 1, 0], kv.scales[:, LAYER, 1, 0], torch.float32)
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("dtype", COMPUTED)
@pytest.mark.parametrize("stored", STORED)
def test_attention_over_a_pool_is_that_over_its_numbers(
    stored: str, dtype: torch.dtype, window: int | None
) -> None:
    """To the bit: what is read is rounded to the type that is computed in, as dequantize_rows does
    it."""
    lengths, heads, kv_heads, dim, size = [(0, 70), (130, 3), (63, 1)], 4, 2, 40, 7
    kv = pool_of(stored, 45, kv_heads, size, dim)
    plain = torch.full(kv.tensor.shape, torch.nan, dtype=dtype)
    order = torch.randperm(45, generator=torch.Generator().manual_seed(1)).tolist()
    slices, first = [], 0
    for start, count in lengths:
        table = [order.pop() for _ in range(-(-(start + count) // size))]
        slots = torch.tensor([table[p // size] * size + p % size for p in range(start + count)])
        key, value = torch.randn(2, start + count, kv_heads, dim).to(dtype)
        kv_write(kv.tensor, LAYER, slot_rows(slots, kv.tensor), key, value, kv.scales)
        at = (slots // size, LAYER, slice(None), slice(None), slots % size)
        plain[at] = (
            kv.tensor[at].to(dtype)
            if kv.scales is None
            else dequantize_rows(kv.tensor[at], kv.scales[at], dtype)
        )
        slices.append(AttentionSlice(first, count, start, table))
        first += count
    query = torch.randn(first, heads, dim).to(dtype)
    results = []
    for pool, scales in ((kv.tensor, kv.scales), (plain, None)):
        plan = plan_attention(slices, pool, heads, 0.3, window, dtype)
        assert isinstance(plan, AttentionPlan)
        results.append(paged_attention(query, query, query, pool, LAYER, plan, scales))
    assert torch.isfinite(results[0]).all()
    assert torch.equal(*results)

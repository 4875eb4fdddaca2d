"""Each op's torch twin against its formula in float64, at odd sizes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.types import KEY_VALUE, LATENT, KvLayout
from baton_kernels.gated_activation import swiglu
from baton_kernels.kv_write import head_stride, kv_write, slot_rows
from baton_kernels.paged_attention import (
    MAX_GROUPED_TOKENS,
    TILE_TOKENS,
    AttentionSlice,
    paged_attention,
    plan_attention,
)
from baton_kernels.rms_norm import rms_norm
from baton_kernels.rope import rope, rope_tables
from engine.kv.tensors.paged import TorchKvPool


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 2, 33)])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_rms_norm(shape: tuple[int, ...], size: float) -> None:
    x, weight = randn(*shape) * size, randn(shape[-1], seed=1)
    wanted = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    got = rms_norm(x.float(), weight.float(), 1e-5)
    torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(1, 2), (3, 14), (5, 66)])
def test_swiglu(shape: tuple[int, int]) -> None:
    x = randn(*shape) * 5
    gate, up = x[:, : shape[1] // 2], x[:, shape[1] // 2 :]
    wanted = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(swiglu(x.float()).double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 1, 2), (5, 3, 6), (7, 2, 64)])
def test_rope_turns_each_pair_by_its_angle(tokens: int, heads: int, dim: int) -> None:
    """As complex numbers a + ib, the halves' pairs are multiplied by scaling * e^(i position
    inv_freq)."""
    x = randn(tokens, heads, dim)
    positions = torch.arange(tokens) * 37 + 5
    inv_freq = torch.rand(dim // 2, generator=torch.Generator().manual_seed(2))
    cos, sin = rope_tables(positions, inv_freq[None], 1.25, torch.float32)
    got = rope(x.float(), cos, sin)
    pairs = torch.complex(x[..., : dim // 2], x[..., dim // 2 :])
    angles = positions[:, None].double() * inv_freq.double()
    turned = pairs * torch.polar(torch.full_like(angles, 1.25), angles)[:, None]
    wanted = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(got.double(), wanted, atol=1e-4, rtol=1e-5)


def test_kv_write_touches_its_slots_alone() -> None:
    pool = torch.zeros(5, 3, 2, 2, 4, 6)
    slots = torch.tensor([17, 0, -1, 7, 8])
    key, value = randn(5, 2, 6).float(), randn(5, 2, 6, seed=1).float()
    kv_write(pool, 1, slot_rows(slots, pool), key, value)
    wanted = torch.zeros_like(pool)
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        wanted[slot // 4, 1, 0, :, slot % 4] = key[token]
        wanted[slot // 4, 1, 1, :, slot % 4] = value[token]
    assert torch.equal(pool, wanted)


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("num_heads", [1, 2])
@pytest.mark.parametrize("parts", [KEY_VALUE, LATENT])
def test_heads_of_a_pool_with_scales_are_so_far_apart(
    parts: tuple[str, ...], num_heads: int, num_layers: int
) -> None:
    """Whatever strides torch gives dimensions of one element."""
    layout = KvLayout("", num_layers, num_heads, 8, "int8", 4, parts=parts)
    pool = TorchKvPool(layout, 3, torch.device("cpu"))
    assert pool.scales is not None
    assert head_stride(pool.tensor) == 4 * 8 + 4 * 4
    assert head_stride(pool.scales) == (4 * 8 + 4 * 4) // 4


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """The formula for one sequence: query [q, heads, dim] are the last of keys, values [len,
    kv_heads, dim]."""
    num_queries, num_heads, _ = query.shape
    group = num_heads // keys.shape[1]
    out = torch.empty_like(query)
    for i in range(num_queries):
        position = len(keys) - num_queries + i
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(num_heads):
            own_keys = keys[first : position + 1, head // group]
            weights = (own_keys @ query[i, head] * scale).softmax(0)
            out[i, head] = weights @ values[first : position + 1, head // group]
    return out


def check_attention(
    lengths: list[tuple[int, int]],
    block_size: int,
    heads: tuple[int, int],
    window: int | None,
) -> None:
    """lengths: (cached tokens, new tokens) of each sequence. What no token wrote holds NaN."""
    num_heads, num_kv_heads = heads
    dim, layer, scale = 6, 1, 1 / math.sqrt(7)
    num_blocks = sum(-(-(a + b) // block_size) for a, b in lengths)
    pool = torch.full((num_blocks, 2, 2, num_kv_heads, block_size, dim), float("nan"))
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
    slices, wanted, fresh = [], [], []
    first_row = 0
    for index, (cached, new) in enumerate(lengths):
        total = cached + new
        table = [order.pop() for _ in range(-(-total // block_size))]
        query = randn(new, num_heads, dim, seed=3 * index)
        key = randn(total, num_kv_heads, dim, seed=3 * index + 1)
        value = randn(total, num_kv_heads, dim, seed=3 * index + 2)
        for position in range(total):
            block = table[position // block_size]
            pool[block, layer, 0, :, position % block_size] = key[position].float()
            pool[block, layer, 1, :, position % block_size] = value[position].float()
        wanted.append(attend(query, key, value, scale, window))
        fresh.append((query, key[cached:], value[cached:]))
        slices.append(AttentionSlice(first_row, new, cached, table))
        first_row += new
    query, key, value = (torch.cat(parts).float() for parts in zip(*fresh, strict=True))
    plan = plan_attention(slices, pool, num_heads, scale, window)
    got = paged_attention(query, key, value, pool, layer, plan)
    torch.testing.assert_close(got.double(), torch.cat(wanted), atol=2e-5, rtol=1e-4)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(
        st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(1, 25))),
        min_size=1,
        max_size=6,
    ),
    block_size=st.integers(1, 9),
    heads=st.sampled_from([(1, 1), (4, 4), (6, 2), (5, 1)]),
    window=st.one_of(st.none(), st.integers(1, 30)),
)
def test_paged_attention(
    lengths: list[tuple[int, int]], block_size: int, heads: tuple[int, int], window: int | None
) -> None:
    check_attention(lengths, block_size, heads, window)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float16])
def test_attention_reads_what_the_pool_has_rounded(dtype: torch.dtype) -> None:
    """New tokens are read rounded, too; otherwise they would differ from chunk to chunk. The keys
    and values given here are garbage."""
    lengths, dim = [(0, MAX_GROUPED_TOKENS + 3), (20, 2), (30, MAX_GROUPED_TOKENS + 1)], 6
    pool = torch.full((20, 2, 2, 2, 6, dim), 127.0).to(dtype)
    scales = None if dtype == torch.float16 else torch.full(pool.shape[:-1], torch.nan)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1)).tolist()
    slices, wanted, queries, first = [], [], [], 0
    for cached, new in lengths:
        total = cached + new
        table = [order.pop() for _ in range(-(-total // 6))]
        slots = torch.tensor([table[p // 6] * 6 + p % 6 for p in range(total)])
        key, value = (randn(total, 2, dim, seed=total + i).float() for i in range(2))
        kv_write.twin(pool, 1, slot_rows(slots, pool), key, value, scales)
        at = (slots // 6, 1, slice(None), slice(None), slots % 6)
        kept = pool[at].double() * (1.0 if scales is None else scales[at].double()[..., None])
        queries.append(randn(new, 4, dim, seed=total + 2))
        wanted.append(attend(queries[-1], kept[:, 0], kept[:, 1], 0.3, None))
        slices.append(AttentionSlice(first, new, cached, table))
        first += new
    plan = plan_attention.twin(slices, pool, 4, 0.3, None, torch.float32)
    garbage = torch.full((first, 2, dim), torch.nan)
    query = torch.cat(queries).float()
    got = paged_attention.twin(query, garbage, garbage, pool, 1, plan, scales)
    torch.testing.assert_close(got.double(), torch.cat(wanted), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 3, TILE_TOKENS + 20])
@pytest.mark.parametrize("cached", [0, 5, TILE_TOKENS + 3])
def test_paged_attention_in_tiles(cached: int, window: int | None) -> None:
    lengths = [(cached, TILE_TOKENS + 17), (3, 1), (0, MAX_GROUPED_TOKENS + 1)]
    check_attention(lengths, 7, (2, 1), window)

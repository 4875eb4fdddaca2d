"""Causal attention of a packed batch over the paged KV pool: prefill over a cached prefix, decode
and verification.

For a query at position p, head h, KV head g = h // GROUP, over positions j <= p, and j > p - window
if there is a window: s_j = q . k_j * scale [softcap * tanh(s_j / softcap) if there is a soft-cap]
out = sum_j softmax_j(s_j + slope_h * (j - p)) v_j [slopes: ALiBi] A sink is one more score, for a
key with the value 0. See ScoreTerms.

Work is split into items: a range of a sequence's new tokens and a range of its keys. A program runs
one item for one KV head; the GROUP heads that share it are rows of one matrix: BLOCK_M rows =
tokens * GROUP. Sequences with few rows (decode, verification) are split into items of SPLIT_TOKENS
keys, those with somewhat more rows (the end of a prompt, or tokens after a cached prefix) into
items of LONG_SPLIT_TOKENS keys per tile; attention_merge merges their results. Softmax is online
(Milakov and Gimelshein, 2018; FlashAttention, Dao et al., 2022), in base 2.

A row's result depends on its own sequence alone: ranges start at multiples of their size, tiles at
multiples of BLOCK_N, and both sizes depend on the sequence's number of new tokens, not on the
batch.

query, out [tokens, heads, head_dim]; pool [blocks, layers, 2, kv_heads, block_size, head_dim];
scales, if the pool is quantised, [blocks, layers, 2, kv_heads, block_size]. "Head" here means the
contiguous rows of one block, layer, part and KV head; heads lie stride elements, or scale_stride
scales, apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

from baton_kernels.gpu.attention_merge import merge_parts, online_softmax, read_item
from baton_kernels.gpu.attention_plan import (
    ITEM_FIELDS,
    AttentionPlan,
    Launch,
    Tile,
    choose_tile,
    head_blocks,
    list_items,
    num_items,
)
from baton_kernels.gpu.latent_attention import attend_latent
from baton_kernels.gpu.padded_plan import (
    PlanRoom,
    Sequences,
    empty_partials,
    padded_plan,
    plan_items,
)
from baton_kernels.host_copy import to_device
from baton_kernels.kv_write import head_stride
from baton_kernels.paged_attention import NO_TERMS, AttentionSlice, PlacedTables, ScoreTerms

__all__ = ["attend", "paged_attention", "plan_attention"]


def plan_attention(
    slices: Sequence[AttentionSlice],
    pool: torch.Tensor,
    num_heads: int,
    scale: float,
    window: int | None,
    dtype: torch.dtype | None = None,
    placed: PlacedTables | None = None,
    *,
    choose: Callable[[int, torch.Tensor, torch.dtype], Tile] = choose_tile,
    fill: Callable[[Sequences, AttentionPlan], None] = plan_items,
) -> AttentionPlan:
    """See the twin. If tables are placed, the device makes the items of sequences with one new
    token (`fill`, see plan_items), because their number grows with context length.

    choose: returns the tile for a number of rows. Raises ValueError if more heads share a KV head
    than a tile has rows.
    """
    if placed is None:
        return list_items(slices, pool, num_heads, scale, window, dtype, choose=choose)
    parts = list(zip(slices, placed.begins, strict=True))
    longs = [(part, begin) for part, begin in parts if part.num_tokens > 1]
    singles = [(part, begin) for part, begin in parts if part.num_tokens == 1]
    launches: tuple[Launch, ...] = ()
    if longs:
        others = PlacedTables(placed.entries, [begin for _, begin in longs])
        launches = list_items(
            [part for part, _ in longs], pool, num_heads, scale, window, dtype, others,
            choose=choose,
        ).launches  # fmt: skip
    if singles:
        tile = choose(num_heads // head_blocks(pool, num_heads), pool, dtype or pool.dtype)
        count = sum(num_items(part.start, window, tile) for part, _ in singles)
        room = PlanRoom(count, len(singles) if count > len(singles) else 0)
        columns = torch.tensor(
            [(part.start, 0, begin, part.first_row) for part, begin in singles], dtype=torch.int32
        )
        fields = torch.empty(room.num_fields, dtype=torch.int32, device=pool.device)
        partials = empty_partials(count if room.num_merges else 0, pool, tile, num_heads)
        plan = padded_plan(fields, placed.entries, room, tile, partials, scale, window)
        fill(Sequences(*to_device(columns.T.contiguous(), pool.device)), plan)
        launches += plan.launches
    return AttentionPlan(scale, window, placed.entries, launches)


_LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def _scores(
    q, k, k_scale, keys, positions, slopes, scale, softcap,
    HAS_SCALES: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores in base 2 [BLOCK_M, BLOCK_N], not masked."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if HAS_SCALES:
        s *= k_scale[None, :]
    s *= scale
    if HAS_SOFTCAP:
        # tanh(x) = 1 - 2 / (e^2x + 1), exact at both infinities.
        s = softcap * (1.0 - 2.0 / (tl.exp2(s * (2.0 * _LOG2_E / softcap)) + 1.0))
    if HAS_SLOPES:
        s += slopes[:, None] * (keys[None, :] - positions[:, None]).to(tl.float32)
    return s * _LOG2_E


@triton.jit
def _tile(
    acc, peak, total, block, q, positions, slopes, start, oldest, end,
    pool_ptr, scales_ptr, table_ptr, block_heads, first_head, kind_heads, stride, scale_stride,
    scale, softcap, window,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SCALES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add keys [start, start + BLOCK_N), in blocks `block` [BLOCK_N], to the running softmax. Keys
    before `oldest` and from `end` on are masked: the table may name other sequences' blocks there.
    Also returns the blocks of the next tile: read one tile ahead, they do not delay the prefetch of
    keys."""
    keys = start + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    there = (keys >= oldest) & (keys < end) if HAS_WINDOW else keys < end
    head = block.to(tl.int64) * block_heads + first_head
    offset = keys % BLOCK_SIZE
    ahead = keys + BLOCK_N
    block = tl.load(table_ptr + ahead // BLOCK_SIZE, mask=ahead < end, other=0)
    at = (head * stride + offset * HEAD_DIM)[:, None] + dims[None, :]
    to_value = kind_heads * stride
    # Read masked values as 0, not only weight them by 0: an earlier owner may have left NaN.
    if MASKED:
        inside = there[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(pool_ptr + at, mask=inside, other=0.0)
        v = tl.load(pool_ptr + at + to_value, mask=inside, other=0.0)
    elif BLOCK_D != HEAD_DIM:
        inside = (dims < HEAD_DIM)[None, :]
        k = tl.load(pool_ptr + at, mask=inside, other=0.0)
        v = tl.load(pool_ptr + at + to_value, mask=inside, other=0.0)
    else:
        k = tl.load(pool_ptr + at)
        v = tl.load(pool_ptr + at + to_value)
    if HAS_SCALES:
        at_scale = head * scale_stride + offset
        k_scale = tl.load(scales_ptr + at_scale, mask=there, other=0.0)
        v_scale = tl.load(scales_ptr + at_scale + kind_heads * scale_stride, mask=there, other=0.0)
    else:
        k_scale = None
        v_scale = None
    s = _scores(
        q, k.to(q.dtype), k_scale, keys, positions, slopes, scale, softcap,
        HAS_SCALES, HAS_SOFTCAP, HAS_SLOPES, PRECISION,
    )  # fmt: skip
    if MASKED:
        visible = there[None, :] & (keys[None, :] <= positions[:, None])
        if HAS_WINDOW:
            visible = visible & (keys[None, :] > positions[:, None] - window)
        s = tl.where(visible, s, float("-inf"))
    p, fade, peak, total = online_softmax(s, peak, total, MASKED)
    if HAS_SCALES:
        p *= v_scale[None, :]
    acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * fade[:, None], input_precision=PRECISION)
    return acc, peak, total, block


@triton.jit(do_not_specialize=["window"], do_not_specialize_on_alignment=["items_ptr"])
def _attend(
    q_ptr, pool_ptr, scales_ptr, table_ptr, items_ptr, slopes_ptr, sinks_ptr,
    out_ptr, part_ptr, lse_ptr,
    q_stride, block_heads, layer_head, stride, scale_stride, scale, softcap, window,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, ITEM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr,
    HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (items, kv_heads). Writes `out`, or a partial result: part [parts, kv_heads, BLOCK_M,
    HEAD_DIM] and its log2-sum-exp [parts, kv_heads, BLOCK_M], float32."""
    kv_head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    first_token, num_tokens, position, first_entry, begin, end, part = read_item(items_ptr, ITEM)
    table_ptr += first_entry

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    token = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    inside = (token < num_tokens)[:, None] & (dims < HEAD_DIM)[None, :]
    # Rows past the last token are zeros and are not written.
    q_at = (first_token + token).to(tl.int64) * q_stride + head * HEAD_DIM
    q = tl.load(q_ptr + q_at[:, None] + dims[None, :], mask=inside, other=0.0)
    positions = position + token
    slopes = 0.0
    if HAS_SLOPES:
        slopes = tl.load(slopes_ptr + head)

    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    oldest = tl.maximum(position - window + 1, 0) if HAS_WINDOW else 0
    if HAS_SINKS:  # noqa: SIM102, the kernel has the inner test in it only then
        # The item with a tile's first key adds the sink.
        if begin <= oldest:
            peak = tl.load(sinks_ptr + head) * _LOG2_E
            total += 1.0
    first_head = layer_head + kv_head
    keys = begin + tl.arange(0, BLOCK_N)
    block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < end, other=0)
    # Tiles that all queries see in full come first and need no mask.
    full_end = begin
    if not HAS_WINDOW:
        full_end = tl.maximum(begin, tl.minimum(position + 1, end) // BLOCK_N * BLOCK_N)
    for start in range(begin, full_end, BLOCK_N):
        acc, peak, total, block = _tile(
            acc, peak, total, block, q, positions, slopes, start, oldest, end,
            pool_ptr, scales_ptr, table_ptr, block_heads, first_head, num_kv_heads,
            stride, scale_stride, scale, softcap, window,
            HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D,
            False, HAS_WINDOW, HAS_SCALES, HAS_SOFTCAP, HAS_SLOPES, PRECISION,
        )  # fmt: skip
    for start in range(full_end, end, BLOCK_N):
        acc, peak, total, block = _tile(
            acc, peak, total, block, q, positions, slopes, start, oldest, end,
            pool_ptr, scales_ptr, table_ptr, block_heads, first_head, num_kv_heads,
            stride, scale_stride, scale, softcap, window,
            HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D,
            True, HAS_WINDOW, HAS_SCALES, HAS_SOFTCAP, HAS_SLOPES, PRECISION,
        )  # fmt: skip

    # A row of a partial result may have seen no key: peak -inf, total 0.
    total = tl.where(total > 0.0, total, 1.0)
    acc = acc / total[:, None]
    if part < 0:
        out_at = ((first_token + token).to(tl.int64) * (num_kv_heads * GROUP) + head) * HEAD_DIM
        tl.store(
            out_ptr + out_at[:, None] + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside
        )
    else:
        part_row = (part.to(tl.int64) * num_kv_heads + kv_head) * BLOCK_M + rows
        tl.store(part_ptr + part_row[:, None] * HEAD_DIM + dims[None, :], acc, mask=inside)
        tl.store(lse_ptr + part_row, peak + tl.log2(total), mask=token < num_tokens)


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,  # noqa: ARG001
    value: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    plan: AttentionPlan,
    scales: torch.Tensor | None = None,
    terms: ScoreTerms = NO_TERMS,
) -> torch.Tensor:
    """See the twin. Heads and elements of query must be contiguous; its tokens may be apart. New
    keys and values are read from the pool."""
    if pool.shape[2] == 1:
        return attend_latent(query, pool, scales, layer, plan, value.shape[2], terms)
    return attend(query, pool, scales, layer, plan, terms)


def attend(
    query: torch.Tensor,
    pool: torch.Tensor,
    scales: torch.Tensor | None,
    layer: int,
    plan: AttentionPlan,
    terms: ScoreTerms = NO_TERMS,
) -> torch.Tensor:
    """Attention over a pool of keys and values of any dtype; scales if it is quantised: see
    kv_write."""
    num_tokens, num_heads, head_dim = query.shape
    _, num_layers, _, num_kv_heads, block_size, _ = pool.shape
    if query.stride(2) != 1 or query.stride(1) != head_dim:
        raise ValueError("heads of the query are not contiguous")
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=query.dtype, device=query.device)
    layer_heads = 2 * num_kv_heads
    group = num_heads // num_kv_heads
    block_d = max(16, triton.next_power_of_2(head_dim))
    for launch in plan.launches:
        tile = launch.tile
        _attend[(len(launch.items), num_kv_heads)](
            query, pool, scales, plan.table, launch.items, terms.slopes, terms.sinks,
            out, launch.part, launch.lse,
            query.stride(0), num_layers * layer_heads, layer * layer_heads,
            head_stride(pool), 0 if scales is None else head_stride(scales),
            plan.scale, terms.softcap or 1.0, plan.window or 0,
            GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, ITEM=ITEM_FIELDS,
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_D=block_d,
            HAS_WINDOW=plan.window is not None, HAS_SCALES=scales is not None,
            HAS_SOFTCAP=terms.softcap is not None, HAS_SLOPES=terms.slopes is not None,
            HAS_SINKS=terms.sinks is not None, PRECISION="ieee",
            num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=True,
        )  # fmt: skip
        merge_parts(launch, out)
    return out

"""Causal attention over a pool of one part (multi-head latent attention): each row is key and
value. See baton_kernels.layer.LatentAttention.

For a query at position p, of any head, over the rows j <= p of its sequence:
    s_j = q . row_j * scale
    out = sum_j softmax_j(s_j) row_j[:VALUE_DIM]

    query [tokens, heads, row]; out [tokens, heads, value_dim]; pool [blocks, layers, 1, 1,
    block_size, row]; scales, if the pool is quantised, [blocks, layers, 1, 1, block_size]

Work is split into items by the rules of paged_attention. All heads read the same rows: GROUP heads
(see head_blocks) times the item's tokens are the rows of one matrix, and a program runs one item
for one block of heads. It loads each tile of keys once: the first VALUE_DIM elements are used as
keys and as values, the rotated rest as keys only.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from baton_kernels.gpu.attention_merge import merge_parts, online_softmax, read_item
from baton_kernels.gpu.attention_plan import ITEM_FIELDS, AttentionPlan, head_blocks
from baton_kernels.kv_write import head_stride
from baton_kernels.paged_attention import NO_TERMS, ScoreTerms

_LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def _tile(
    acc, peak, total, block, q, q_rest, positions, start, end,
    pool_ptr, scales_ptr, table_ptr, block_heads, layer, stride, scale_stride, scale,
    ROW: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, MASKED: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Add keys [start, start + BLOCK_N), in blocks `block` [BLOCK_N], to the running softmax. Keys
    from `end` on do not exist. Also returns the blocks of the next tile, see paged_attention."""
    keys = start + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_V)
    rest = VALUE_DIM + tl.arange(0, BLOCK_R)
    there = keys < end
    head = block.to(tl.int64) * block_heads + layer
    offset = keys % BLOCK_SIZE
    ahead = keys + BLOCK_N
    block = tl.load(table_ptr + ahead // BLOCK_SIZE, mask=ahead < end, other=0)
    row_ptr = pool_ptr + (head * stride + offset * ROW)[:, None]
    # Read masked values as 0, not only weight them by 0: an earlier owner may have left NaN.
    if MASKED:
        k = tl.load(
            row_ptr + dims[None, :], mask=there[:, None] & (dims < VALUE_DIM)[None, :], other=0.0
        )
        k_rest = tl.load(
            row_ptr + rest[None, :], mask=there[:, None] & (rest < ROW)[None, :], other=0.0
        )
    else:
        if BLOCK_V != VALUE_DIM:
            k = tl.load(row_ptr + dims[None, :], mask=(dims < VALUE_DIM)[None, :], other=0.0)
        else:
            k = tl.load(row_ptr + dims[None, :])
        if BLOCK_R != ROW - VALUE_DIM:
            k_rest = tl.load(row_ptr + rest[None, :], mask=(rest < ROW)[None, :], other=0.0)
        else:
            k_rest = tl.load(row_ptr + rest[None, :])
    k = k.to(q.dtype)
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    s = tl.dot(q_rest, tl.trans(k_rest.to(q.dtype)), s, input_precision="ieee")
    if HAS_SCALES:
        k_scale = tl.load(scales_ptr + head * scale_stride + offset, mask=there, other=0.0)
        s *= k_scale[None, :]
    s *= scale * _LOG2_E
    if MASKED:
        s = tl.where(there[None, :] & (keys[None, :] <= positions[:, None]), s, float("-inf"))
    p, fade, peak, total = online_softmax(s, peak, total, MASKED)
    if HAS_SCALES:
        p *= k_scale[None, :]
    acc = tl.dot(p.to(q.dtype), k, acc * fade[:, None], input_precision="ieee")
    return acc, peak, total, block


@triton.jit(do_not_specialize_on_alignment=["items_ptr"])
def _attend_latent(
    q_ptr, pool_ptr, scales_ptr, table_ptr, items_ptr, out_ptr, part_ptr, lse_ptr,
    q_stride, block_heads, layer, stride, scale_stride, scale,
    GROUP: tl.constexpr, ROW: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ITEM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Grid (items, blocks of heads). Writes `out`, or a partial result: part [parts, blocks of
    heads, BLOCK_M, ROW] (VALUE_DIM elements of each ROW) and its log2-sum-exp [parts, blocks of
    heads, BLOCK_M], float32."""
    head_block = tl.program_id(1)
    num_blocks = tl.num_programs(1)
    first_token, num_tokens, position, first_entry, begin, end, part = read_item(items_ptr, ITEM)
    table_ptr += first_entry

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_V)
    rest = VALUE_DIM + tl.arange(0, BLOCK_R)
    token = rows // GROUP
    head = head_block * GROUP + rows % GROUP
    is_row = token < num_tokens
    inside = is_row[:, None] & (dims < VALUE_DIM)[None, :]
    # Rows past the last token are zeros and are not written.
    q_row = q_ptr + ((first_token + token).to(tl.int64) * q_stride + head * ROW)[:, None]
    q = tl.load(q_row + dims[None, :], mask=inside, other=0.0)
    q_rest = tl.load(q_row + rest[None, :], mask=is_row[:, None] & (rest < ROW)[None, :], other=0.0)
    positions = position + token

    acc = tl.zeros([BLOCK_M, BLOCK_V], dtype=tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    keys = begin + tl.arange(0, BLOCK_N)
    block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < end, other=0)
    # Tiles that all queries see in full come first and need no mask.
    full_end = tl.maximum(begin, tl.minimum(position + 1, end) // BLOCK_N * BLOCK_N)
    for start in range(begin, full_end, BLOCK_N):
        acc, peak, total, block = _tile(
            acc, peak, total, block, q, q_rest, positions, start, end,
            pool_ptr, scales_ptr, table_ptr, block_heads, layer, stride, scale_stride, scale,
            ROW, VALUE_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_V, BLOCK_R, False, HAS_SCALES,
        )  # fmt: skip
    for start in range(full_end, end, BLOCK_N):
        acc, peak, total, block = _tile(
            acc, peak, total, block, q, q_rest, positions, start, end,
            pool_ptr, scales_ptr, table_ptr, block_heads, layer, stride, scale_stride, scale,
            ROW, VALUE_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_V, BLOCK_R, True, HAS_SCALES,
        )  # fmt: skip

    # A row of a partial result may have seen no key: peak -inf, total 0.
    total = tl.where(total > 0.0, total, 1.0)
    acc = acc / total[:, None]
    if part < 0:
        out_row = (first_token + token).to(tl.int64) * (num_blocks * GROUP) + head
        tl.store(
            out_ptr + out_row[:, None] * VALUE_DIM + dims[None, :],
            acc.to(out_ptr.dtype.element_ty),
            mask=inside,
        )
    else:
        part_row = (part.to(tl.int64) * num_blocks + head_block) * BLOCK_M + rows
        tl.store(part_ptr + part_row[:, None] * ROW + dims[None, :], acc, mask=inside)
        tl.store(lse_ptr + part_row, peak + tl.log2(total), mask=is_row)


def attend_latent(
    query: torch.Tensor,
    pool: torch.Tensor,
    scales: torch.Tensor | None,
    layer: int,
    plan: AttentionPlan,
    value_dim: int,
    terms: ScoreTerms = NO_TERMS,
) -> torch.Tensor:
    """paged_attention over a pool of one part. Heads and elements of query must be contiguous; its
    tokens may be apart. Raises ValueError for a window, for score terms, and for a pool of several
    heads."""
    num_tokens, num_heads, row = query.shape
    _, num_layers, _, num_kv_heads, block_size, _ = pool.shape
    if num_kv_heads != 1 or plan.window is not None or not terms.is_none:
        raise ValueError("latent attention of several KV heads, with a window, or with terms")
    if query.stride(2) != 1 or query.stride(1) != row:
        raise ValueError("heads of the query are not contiguous")
    out = torch.empty(num_tokens, num_heads, value_dim, dtype=query.dtype, device=query.device)
    num_blocks = head_blocks(pool, num_heads)
    for launch in plan.launches:
        tile = launch.tile
        _attend_latent[(len(launch.items), num_blocks)](
            query, pool, scales, plan.table, launch.items, out, launch.part, launch.lse,
            query.stride(0), num_layers, layer, head_stride(pool),
            0 if scales is None else head_stride(scales), plan.scale,
            GROUP=num_heads // num_blocks, ROW=row, VALUE_DIM=value_dim, BLOCK_SIZE=block_size,
            ITEM=ITEM_FIELDS, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            BLOCK_V=max(16, triton.next_power_of_2(value_dim)),
            BLOCK_R=max(16, triton.next_power_of_2(row - value_dim)),
            HAS_SCALES=scales is not None, num_warps=tile.num_warps, num_stages=tile.num_stages,
            enable_fp_fusion=True,
        )  # fmt: skip
        merge_parts(launch, out)
    return out

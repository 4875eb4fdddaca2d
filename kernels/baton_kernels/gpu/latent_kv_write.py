"""Normalises the latent, rotates the RoPE part, assembles queries and rows, and writes the rows
into the paged KV pool, in one pass: see the twin. Rounds as rope_kv_write does.

absorbed [tokens, heads, rank], turned [tokens, heads, rope_dim], heads at any stride; latent
[tokens, rank + rope_dim], tokens at any stride; weight [rank]; cos, sin [tokens, rope_dim / 2];
rows [tokens] int64 from slot_rows, negative for tokens that are not written; scales, if the pool is
quantised, one float32 per row.

A program handles HEADS heads of one token; the token's first program also writes its row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton_kernels.gpu.quantize_rows import magnitude, scale_of
from baton_kernels.gpu.rope_kv_write import _rotate
from baton_kernels.kv_write import head_stride
from baton_kernels.layer import Norm
from baton_kernels.quantize_rows import LIMITS

#: Query elements per program.
PROGRAM_ELEMENTS = 8192


@triton.jit
def _latent_kv_write(
    absorbed_ptr, turned_ptr, latent_ptr, weight_ptr, cos_ptr, sin_ptr, rows_ptr,
    query_ptr, row_ptr, pool_ptr, scales_ptr, eps,
    absorbed_token, absorbed_head, turned_token, turned_head, latent_token, layer_row, stride,
    scale_stride,
    NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    LIMIT: tl.constexpr, IS_WIDE: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, blocks of HEADS heads)."""
    ROW: tl.constexpr = RANK + 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK_RANK)
    halves = tl.arange(0, BLOCK_HALF)
    is_dim = dims < RANK
    is_half = halves < HALF
    dtype = query_ptr.dtype.element_ty
    cos = tl.load(cos_ptr + token * HALF + halves, mask=is_half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + token * HALF + halves, mask=is_half, other=0.0).to(tl.float32)[None, :]

    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = heads < NUM_HEADS
    inside = is_head[:, None] & is_dim[None, :]
    absorbed = absorbed_ptr + token * absorbed_token + heads[:, None] * absorbed_head
    query = query_ptr + (token * NUM_HEADS + heads)[:, None] * ROW
    tl.store(
        query + dims[None, :],
        tl.load(absorbed + dims[None, :], mask=inside, other=0.0),
        mask=inside,
    )
    inside = is_head[:, None] & is_half[None, :]
    turned = turned_ptr + token * turned_token + heads[:, None] * turned_head + halves[None, :]
    front = tl.load(turned, mask=inside, other=0.0).to(tl.float32)
    back = tl.load(turned + HALF, mask=inside, other=0.0).to(tl.float32)
    front, back = _rotate(front, back, cos, sin, dtype)
    tl.store(query + RANK + halves[None, :], front, mask=inside)
    tl.store(query + RANK + HALF + halves[None, :], back, mask=inside)

    if tl.program_id(1) == 0:
        latent = latent_ptr + token * latent_token
        plain = tl.load(latent + dims, mask=is_dim, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + dims, mask=is_dim, other=0.0).to(tl.float32)
        plain = plain * tl.rsqrt(tl.sum(plain * plain, 0) / RANK + eps)
        if not IS_WIDE:
            plain = plain.to(dtype).to(tl.float32)
        plain = (plain * weight).to(dtype)
        shared = latent + RANK + halves[None, :]
        is_shared = is_half[None, :]
        low = tl.load(shared, mask=is_shared, other=0.0).to(tl.float32)
        high = tl.load(shared + HALF, mask=is_shared, other=0.0).to(tl.float32)
        low, high = _rotate(low, high, cos, sin, dtype)
        row = row_ptr + token * ROW
        tl.store(row + dims, plain, mask=is_dim)
        tl.store(row + RANK + halves[None, :], low, mask=is_shared)
        tl.store(row + RANK + HALF + halves[None, :], high, mask=is_shared)

        at = tl.load(rows_ptr + token)
        if at >= 0:
            at += layer_row
            group = at // BLOCK_SIZE
            offset = at % BLOCK_SIZE
            kept = pool_ptr + group * stride + offset * ROW
            kept_dtype = pool_ptr.dtype.element_ty
            first = plain.to(tl.float32)
            second = low.to(tl.float32)
            third = high.to(tl.float32)
            if LIMIT != 0:
                turned_peak = tl.max(tl.max(tl.maximum(magnitude(second), magnitude(third)), 1), 0)
                scale = scale_of(tl.maximum(tl.max(magnitude(first), 0), turned_peak), LIMIT)
                is_finite = scale > 0.0
                first = tl.where(is_finite, first / scale, 0.0)
                second = tl.where(is_finite, second / scale, 0.0)
                third = tl.where(is_finite, third / scale, 0.0)
                if kept_dtype == tl.int8:
                    first = tl.floor(first + 0.5)
                    second = tl.floor(second + 0.5)
                    third = tl.floor(third + 0.5)
                tl.store(scales_ptr + group * scale_stride + offset, scale)
            tl.store(kept + dims, first.to(kept_dtype), mask=is_dim)
            tl.store(kept + RANK + halves[None, :], second.to(kept_dtype), mask=is_shared)
            tl.store(kept + RANK + HALF + halves[None, :], third.to(kept_dtype), mask=is_shared)


def latent_kv_write(
    absorbed: torch.Tensor,
    turned: torch.Tensor,
    latent: torch.Tensor,
    norm: Norm[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    rows: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the twin. Elements of the inputs must be contiguous; heads and tokens may be apart."""
    num_tokens, num_heads, rank = absorbed.shape
    half, block_size = turned.shape[2] // 2, pool.shape[4]
    if any(x.stride(-1) != 1 for x in (absorbed, turned, latent)):
        raise ValueError("elements are not contiguous")
    if not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError("cos or sin is not contiguous")
    query = absorbed.new_empty(num_tokens, num_heads, rank + 2 * half)
    row = absorbed.new_empty(num_tokens, 1, rank + 2 * half)
    block_rank = triton.next_power_of_2(rank)
    heads = min(triton.next_power_of_2(num_heads), max(1, PROGRAM_ELEMENTS // block_rank))
    _latent_kv_write[(num_tokens, triton.cdiv(num_heads, heads))](
        absorbed, turned, latent, norm.weight, cos, sin, rows, query, row, pool, scales, norm.eps,
        absorbed.stride(0), absorbed.stride(1), turned.stride(0), turned.stride(1),
        latent.stride(0), layer * block_size, head_stride(pool),
        0 if scales is None else head_stride(scales),
        NUM_HEADS=num_heads, HEADS=heads, RANK=rank, HALF=half, BLOCK_RANK=block_rank,
        BLOCK_HALF=triton.next_power_of_2(half), BLOCK_SIZE=block_size,
        LIMIT=0 if scales is None else LIMITS[pool.dtype],
        IS_WIDE=norm.weight.dtype == torch.float32, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return query, row

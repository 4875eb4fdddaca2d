"""Normalises queries and keys per head (in models that do), rotates them by their positions, and
writes keys and values into the paged KV pool, in one pass.

    x = x / sqrt(mean(x^2) + eps) * weight   of a head; rounded where rms_norm's twin rounds

A head vector is split in halves (a, b); with c, s the cosine and sine of its position's angles,
    a' = a c - b s,    b' = b c + a s        each product rounded to the dtype, as the twin's are.

query [tokens, heads, head_dim], key, value [tokens, kv_heads, head_dim], heads contiguous, tokens
at any stride; weights [head_dim]; cos, sin [tokens, head_dim / 2]; rows [tokens * kv_heads] int64
from slot_rows: BLOCK_SIZE rows of head_dim elements are contiguous, and these groups lie stride
elements apart; scales, if the pool is quantised, one float32 per row: see baton_kernels.kv_write.
Tokens without a slot have negative rows and are not written.

A program handles one token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton_kernels.gpu.quantize_rows import magnitude, scale_of
from baton_kernels.kv_write import head_stride
from baton_kernels.layer import Norm
from baton_kernels.quantize_rows import LIMITS


@triton.jit
def _norm(
    first, second, weight_ptr, eps, dims, dtype,
    HALF: tl.constexpr, HAS_NORM: tl.constexpr, IS_WIDE: tl.constexpr,
):  # fmt: skip
    """Halves [heads, head_dim / 2] -> normalised halves, float32 with values of `dtype`; unchanged
    without HAS_NORM. IS_WIDE: the weight is float32 for any dtype."""
    if HAS_NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        first = first * scale
        second = second * scale
        if not IS_WIDE:
            first = first.to(dtype).to(tl.float32)
            second = second.to(dtype).to(tl.float32)
        first_weight = tl.load(weight_ptr + dims, mask=dims < HALF, other=0.0)
        second_weight = tl.load(weight_ptr + HALF + dims, mask=dims < HALF, other=0.0)
        first = (first * first_weight.to(tl.float32)[None, :]).to(dtype).to(tl.float32)
        second = (second * second_weight.to(tl.float32)[None, :]).to(dtype).to(tl.float32)
    return first, second


@triton.jit
def _rotate(first, second, cos, sin, dtype):
    """Halves [heads, head_dim / 2] -> rotated halves, of `dtype`."""
    first_cos = (first * cos).to(dtype).to(tl.float32)
    second_sin = (second * sin).to(dtype).to(tl.float32)
    second_cos = (second * cos).to(dtype).to(tl.float32)
    first_sin = (first * sin).to(dtype).to(tl.float32)
    return (first_cos - second_sin).to(dtype), (second_cos + first_sin).to(dtype)


@triton.jit
def _store(
    pool_ptr, scales_ptr, rows, stride, scale_stride, first, second, dims, inside,
    BLOCK_SIZE: tl.constexpr, LIMIT: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Write halves [heads, head_dim / 2] into rows [heads] of the pool, quantised if there is a
    LIMIT."""
    head = rows // BLOCK_SIZE
    offset = rows % BLOCK_SIZE
    at = (head * stride + offset * (2 * HALF))[:, None] + dims[None, :]
    dtype = pool_ptr.dtype.element_ty
    if LIMIT == 0:
        tl.store(pool_ptr + at, first.to(dtype), mask=inside)
        tl.store(pool_ptr + at + HALF, second.to(dtype), mask=inside)
    else:
        first = first.to(tl.float32)
        second = second.to(tl.float32)
        scale = scale_of(tl.max(tl.maximum(magnitude(first), magnitude(second)), 1), LIMIT)
        is_finite = (scale > 0.0)[:, None]
        first = tl.where(is_finite, first / scale[:, None], 0.0)
        second = tl.where(is_finite, second / scale[:, None], 0.0)
        if dtype == tl.int8:
            first = tl.floor(first + 0.5)
            second = tl.floor(second + 0.5)
        tl.store(pool_ptr + at, first.to(dtype), mask=inside)
        tl.store(pool_ptr + at + HALF, second.to(dtype), mask=inside)
        # `inside` is uniform along a row, except for the padding of head_dim.
        at = head * scale_stride + offset
        tl.store(scales_ptr + at, scale, mask=tl.max(inside.to(tl.int32), 1) > 0)


@triton.jit
def _rope_kv_write(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, rows_ptr, q_out_ptr, k_out_ptr, pool_ptr, scales_ptr,
    q_weight_ptr, k_weight_ptr, q_eps, k_eps,
    q_stride, k_stride, v_stride, layer_row, kind_rows, stride, scale_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_KV_HEADS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    LIMIT: tl.constexpr, HAS_Q_NORM: tl.constexpr, HAS_K_NORM: tl.constexpr,
    IS_WIDE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    dtype = q_out_ptr.dtype.element_ty
    cos = tl.load(cos_ptr + token * HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)[
        None, :
    ]
    sin = tl.load(sin_ptr + token * HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)[
        None, :
    ]

    heads = tl.arange(0, BLOCK_HEADS)
    inside = (heads < HEADS)[:, None] & (dims < HALF)[None, :]
    within = heads[:, None] * (2 * HALF) + dims[None, :]
    first = tl.load(q_ptr + token * q_stride + within, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(q_ptr + token * q_stride + within + HALF, mask=inside, other=0.0).to(
        tl.float32
    )
    first, second = _norm(
        first, second, q_weight_ptr, q_eps, dims, dtype, HALF, HAS_Q_NORM, IS_WIDE
    )
    first, second = _rotate(first, second, cos, sin, dtype)
    out = q_out_ptr + token * (HEADS * 2 * HALF) + within
    tl.store(out, first, mask=inside)
    tl.store(out + HALF, second, mask=inside)

    heads = tl.arange(0, BLOCK_KV_HEADS)
    inside = (heads < KV_HEADS)[:, None] & (dims < HALF)[None, :]
    within = heads[:, None] * (2 * HALF) + dims[None, :]
    rows = tl.load(rows_ptr + token * KV_HEADS + heads, mask=heads < KV_HEADS, other=-1)
    is_written = inside & (rows >= 0)[:, None]
    rows += layer_row
    first = tl.load(k_ptr + token * k_stride + within, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(k_ptr + token * k_stride + within + HALF, mask=inside, other=0.0).to(
        tl.float32
    )
    first, second = _norm(
        first, second, k_weight_ptr, k_eps, dims, dtype, HALF, HAS_K_NORM, IS_WIDE
    )
    first, second = _rotate(first, second, cos, sin, dtype)
    out = k_out_ptr + token * (KV_HEADS * 2 * HALF) + within
    tl.store(out, first, mask=inside)
    tl.store(out + HALF, second, mask=inside)
    _store(
        pool_ptr, scales_ptr, rows, stride, scale_stride, first, second, dims, is_written,
        BLOCK_SIZE, LIMIT, HALF,
    )  # fmt: skip

    first = tl.load(v_ptr + token * v_stride + within, mask=inside, other=0.0)
    second = tl.load(v_ptr + token * v_stride + within + HALF, mask=inside, other=0.0)
    _store(
        pool_ptr, scales_ptr, rows + kind_rows, stride, scale_stride, first, second, dims,
        is_written, BLOCK_SIZE, LIMIT, HALF,
    )  # fmt: skip


def rope_kv_write(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    rows: torch.Tensor,
    scales: torch.Tensor | None = None,
    q_norm: Norm[torch.Tensor] | None = None,
    k_norm: Norm[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the twin. Heads and elements of query, key and value must be contiguous; their tokens may
    be apart. Weights of both norms are of one dtype."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, block_size = pool.shape[3], pool.shape[4]
    for x in (query, key, value):
        if x.stride(2) != 1 or x.stride(1) != head_dim:
            raise ValueError("heads are not contiguous")
    if not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError("cos or sin is not contiguous")
    rotated, rotated_key = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key)
    )
    kind_rows = num_kv_heads * block_size
    q_weight, k_weight = (None if norm is None else norm.weight for norm in (q_norm, k_norm))
    weights = [weight for weight in (q_weight, k_weight) if weight is not None]
    _rope_kv_write[(num_tokens,)](
        query, key, value, cos, sin, rows, rotated, rotated_key, pool, scales,
        q_weight, k_weight, q_norm.eps if q_norm else 0.0, k_norm.eps if k_norm else 0.0,
        query.stride(0), key.stride(0), value.stride(0), layer * 2 * kind_rows, kind_rows,
        head_stride(pool), 0 if scales is None else head_stride(scales),
        HEADS=num_heads, KV_HEADS=num_kv_heads, HALF=head_dim // 2,
        BLOCK_HEADS=triton.next_power_of_2(num_heads),
        BLOCK_KV_HEADS=triton.next_power_of_2(num_kv_heads),
        BLOCK=triton.next_power_of_2(head_dim // 2), BLOCK_SIZE=block_size,
        LIMIT=0 if scales is None else LIMITS[pool.dtype],
        HAS_Q_NORM=q_norm is not None, HAS_K_NORM=k_norm is not None,
        IS_WIDE=any(weight.dtype == torch.float32 for weight in weights), num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return rotated, rotated_key

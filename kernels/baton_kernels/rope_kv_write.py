"""Rotate queries and keys by their positions, and write keys and values into the paged KV pool: see rope and kv_write."""

from __future__ import annotations

import torch

from baton_kernels.dispatch import op
from baton_kernels.kv_write import kv_write
from baton_kernels.quantize_rows import quantize_rows
from baton_kernels.rope import rope


@op
def rope_kv_write(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    rows: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [tokens, heads, head_dim], key and value [tokens, kv_heads, head_dim]; cos, sin as rope_tables gives them,
    rows as slot_rows does. Returns rotated queries and keys."""
    query, key = rope(query, cos, sin), rope(key, cos, sin)
    kv_write(pool, layer, rows, key, value)
    return query, key


@op
def rope_kv_write_quantized(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: torch.Tensor,
    scales: torch.Tensor,
    layer: int,
    rows: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same into a pool of int8 or float8_e4m3fn and its scales [blocks, layers, 2, kv_heads, block_size] float32: see
    quantize_rows."""
    query, key = rope(query, cos, sin), rope(key, cos, sin)
    # kv_write moves rows of whatever it is given: codes as bytes, which every torch can index, and scales as rows of one.
    codes, parts = zip(*(quantize_rows(x, pool.dtype) for x in (key, value)), strict=True)
    kv_write(pool.view(torch.uint8), layer, rows, *(x.view(torch.uint8) for x in codes))
    kv_write(scales[..., None], layer, rows, *(x[..., None] for x in parts))
    return query, key

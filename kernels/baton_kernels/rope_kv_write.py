"""Rotate queries and keys by their positions, and write keys and values into the paged KV pool: see
rope and kv_write."""

from __future__ import annotations

import torch

from baton_kernels.dispatch import op
from baton_kernels.kv_write import kv_write
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
    scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [tokens, heads, head_dim], key and value [tokens, kv_heads, head_dim]; cos, sin as
    rope_tables gives them, rows as slot_rows does; scales if the pool is of 8 bits. Returns rotated
    queries and keys, not rounded to the pool's dtype."""
    query, key = rope(query, cos, sin), rope(key, cos, sin)
    kv_write(pool, layer, rows, key, value, scales)
    return query, key

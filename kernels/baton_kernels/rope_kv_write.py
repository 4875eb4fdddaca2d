"""Normalise queries and keys per head (in models that do), rotate them by their positions, and
write keys and values into the paged KV pool: see rms_norm, rope and kv_write."""

from __future__ import annotations

import torch

from baton_kernels.dispatch import op
from baton_kernels.kv_write import kv_write
from baton_kernels.layer import Norm
from baton_kernels.rms_norm import rms_norm
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
    q_norm: Norm[torch.Tensor] | None = None,
    k_norm: Norm[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rotated queries and keys, not rounded to the pool's dtype.

    query [tokens, heads, head_dim]; key, value [tokens, kv_heads, head_dim]; cos, sin from
    rope_tables; rows from slot_rows; scales of an 8-bit pool; norms with weights [head_dim] run
    before the rotation.
    """
    query, key = norm_heads(query, q_norm), norm_heads(key, k_norm)
    query, key = rope(query, cos, sin), rope(key, cos, sin)
    kv_write(pool, layer, rows, key, value, scales)
    return query, key


def norm_heads(heads: torch.Tensor, norm: Norm[torch.Tensor] | None) -> torch.Tensor:
    """Normalise each head of heads [tokens, heads, head_dim]; unchanged without a norm."""
    return heads if norm is None else rms_norm(heads, norm.weight, norm.eps)

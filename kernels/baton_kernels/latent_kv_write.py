"""Latent attention between its linear layers and attention, in one op: normalise the latent, rotate
the RoPE part, assemble queries and rows, and write the rows into the paged KV pool. See
baton_kernels.layer.LatentAttention, rms_norm, rope and kv_write."""

from __future__ import annotations

import torch

from baton_kernels.dispatch import op
from baton_kernels.kv_write import kv_write
from baton_kernels.layer import Norm
from baton_kernels.rms_norm import rms_norm
from baton_kernels.rope import rope


@op
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
    """Returns queries [tokens, heads, rank + rope_dim] and rows [tokens, 1, rank + rope_dim], not
    rounded to the pool's dtype.

    absorbed: [tokens, heads, rank], queries in the space of latents.
    turned: [tokens, heads, rope_dim], the part of each query to rotate.
    latent: [tokens, rank + rope_dim]; the first `rank` elements are normalised, the rest rotated.
    cos, sin: from rope_tables. pool: has one part. rows: from slot_rows.
    scales: of an 8-bit pool.
    """
    query = torch.cat((absorbed, rope(turned, cos, sin)), dim=2)
    rank, rope_dim = absorbed.shape[2], turned.shape[2]
    plain, shared = latent[:, None].split_with_sizes((rank, rope_dim), dim=2)
    plain = rms_norm(plain.contiguous(), norm.weight, norm.eps)
    row = torch.cat((plain, rope(shared, cos, sin)), dim=2)
    kv_write(pool, layer, rows, row, None, scales)
    return query, row

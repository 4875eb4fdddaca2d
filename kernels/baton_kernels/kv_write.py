"""Write new keys and values into their slots of the paged KV pool.

pool [blocks, layers, parts, kv_heads, block_size, head_dim]: pool[b, l, 0, h, o] = key[t, h] and
pool[b, l, 1, h, o] = value[t, h] for token t with slot b * block_size + o. Pools of multi-head
latent attention have one part: their rows serve as key and value.

A pool of int8 or float8_e4m3fn has scales [blocks, layers, parts, kv_heads, block_size] float32,
one per row of head_dim elements: see quantize_rows. The rows of one head in a block are contiguous;
the heads lie head_stride elements apart, which may exceed their size, so that pool and scales can
be views of one memory.
"""

from __future__ import annotations

import math

import torch

from baton_kernels.dispatch import op
from baton_kernels.quantize_rows import quantize_rows


def slot_rows(slots: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
    """Row indices of the first layer's keys, [tokens * kv_heads], in the pool seen as contiguous
    rows of head_dim elements.

    slots [tokens] int64 = block * block_size + offset; -1 for a token without a slot; its rows are
    negative.
    """
    return head_rows(first_rows(slots, pool), pool)


def first_rows(slots: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
    """slot_rows of the first head alone, [tokens]: slot block * block_size + offset becomes block *
    block_rows + offset."""
    block_size = pool.shape[4]
    return slots + slots // block_size * (block_rows(pool) - block_size)


def block_rows(pool: torch.Tensor) -> int:
    """Rows of head_dim elements per block."""
    return math.prod(pool.shape[1:5])


def head_rows(first: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
    """slot_rows, from the rows of the first head: first [tokens] int64 = block * block_rows +
    offset; -block_rows for a token without a slot."""
    num_kv_heads, block_size = pool.shape[3:5]
    heads = torch.arange(0, num_kv_heads * block_size, block_size, device=first.device)
    return (first[:, None] + heads).flatten()


def head_stride(pool: torch.Tensor) -> int:
    """Elements from one head of a block (its rows, or its scales) to the next head."""
    # Skip dimensions of size 1: their stride is arbitrary.
    return next((pool.stride(dim) for dim in (3, 2, 1, 0) if pool.shape[dim] > 1), pool.stride(3))


@op
def kv_write(
    pool: torch.Tensor,
    layer: int,
    rows: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    scales: torch.Tensor | None = None,
) -> None:
    """Write key and value [tokens, kv_heads, head_dim] (value None for a pool of one part), rounded
    to the pool's dtype. rows: from slot_rows, without repeats; negative rows (padding tokens) are
    skipped."""
    _, num_layers, num_parts, num_kv_heads, block_size, head_dim = pool.shape
    is_written = rows >= 0
    rows = rows[is_written]
    group, offset = rows // block_size, rows % block_size
    head = group % num_kv_heads
    block = group // (num_layers * num_parts * num_kv_heads)
    # View codes as bytes: torch cannot index every float8 type.
    target = pool if scales is None else pool.view(torch.uint8)
    for kind, new in enumerate((key,) if value is None else (key, value)):
        vectors = new.reshape(-1, head_dim)[is_written]
        if scales is None:
            target[block, layer, kind, head, offset] = vectors.to(pool.dtype)
        else:
            codes, row_scales = quantize_rows(vectors, pool.dtype)
            target[block, layer, kind, head, offset] = codes.view(torch.uint8)
            scales[block, layer, kind, head, offset] = row_scales

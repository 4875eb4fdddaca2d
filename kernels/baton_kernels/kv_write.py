"""Write new keys and values into their slots of the paged KV pool.

pool [blocks, layers, parts, kv_heads, block_size, head_dim]: pool[b, l, 0, h, o] = key[t, h] and
pool[b, l, 1, h, o] = value[t, h] for token t with slot b * block_size + o. There are two parts, or
one, where a row is key and value in one, as that of multi-head latent attention is.

A pool of int8 or float8_e4m3fn has scales [blocks, layers, parts, kv_heads, block_size] float32,
one for each row of head_dim elements: see quantize_rows. The rows of a block and head are
contiguous; such groups lie head_stride elements apart, which may be more than their size, so that
pool and scales can be views of one memory.
"""

from __future__ import annotations

import math

import torch

from baton_kernels.dispatch import op
from baton_kernels.quantize_rows import quantize_rows


def slot_rows(slots: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
    """The rows of the first layer's keys, [tokens * kv_heads], counted as if the pool were
    contiguous rows of head_dim elements.

    slots [tokens] int64 = block * block_size + offset; -1 for a token without one, whose rows are
    negative.
    """
    return head_rows(first_rows(slots, pool), pool)


def first_rows(slots: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
    """Of the first head alone, [tokens]: block * block_rows + offset where a slot is block *
    block_size + offset."""
    block_size = pool.shape[4]
    return slots + slots // block_size * (block_rows(pool) - block_size)


def block_rows(pool: torch.Tensor) -> int:
    """Rows of head_dim elements in a block."""
    return math.prod(pool.shape[1:5])


def head_rows(first: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
    """slot_rows, from the tokens' rows of the first head: first [tokens] int64 = block * block_rows
    + offset; -block_rows for a token without one."""
    num_kv_heads, block_size = pool.shape[3:5]
    heads = torch.arange(0, num_kv_heads * block_size, block_size, device=first.device)
    return (first[:, None] + heads).flatten()


def head_stride(pool: torch.Tensor) -> int:
    """Elements from one head's rows of a block, or their scales, to the next head's."""
    # The stride of a dimension means nothing where it has only one element.
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
    """key, value [tokens, kv_heads, head_dim], no value for a pool of one part, rounded to the
    pool's dtype; rows as slot_rows gives them, without repeats. Negative ones are written nowhere:
    tokens that only fill a batch up have them."""
    _, num_layers, num_parts, num_kv_heads, block_size, head_dim = pool.shape
    is_written = rows >= 0
    rows = rows[is_written]
    group, offset = rows // block_size, rows % block_size
    head = group % num_kv_heads
    block = group // (num_layers * num_parts * num_kv_heads)
    # Codes are moved as bytes, which torch can index whatever they stand for.
    target = pool if scales is None else pool.view(torch.uint8)
    for kind, new in enumerate((key,) if value is None else (key, value)):
        vectors = new.reshape(-1, head_dim)[is_written]
        if scales is None:
            target[block, layer, kind, head, offset] = vectors.to(pool.dtype)
        else:
            codes, row_scales = quantize_rows(vectors, pool.dtype)
            target[block, layer, kind, head, offset] = codes.view(torch.uint8)
            scales[block, layer, kind, head, offset] = row_scales

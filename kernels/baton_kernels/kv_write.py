"""Write new keys and values into their slots of the paged KV pool.

pool [blocks, layers, 2, kv_heads, block_size, head_dim]: pool[b, l, 0, h, o] = key[t, h] and
pool[b, l, 1, h, o] = value[t, h] for token t with slot b * block_size + o.
"""

from __future__ import annotations

import torch

from baton_kernels.dispatch import op


def slot_rows(slots: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
    """The rows of the first layer's keys, [tokens * kv_heads], in the pool seen as rows of head_dim elements.

    slots [tokens] int64 = block * block_size + offset.
    """
    _, num_layers, _, num_kv_heads, block_size, _ = pool.shape
    block, offset = slots // block_size, slots % block_size
    first = block * (num_layers * 2 * num_kv_heads * block_size) + offset
    heads = torch.arange(num_kv_heads, device=slots.device) * block_size
    return (first[:, None] + heads).flatten()


@op
def kv_write(
    pool: torch.Tensor, layer: int, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """key, value [tokens, kv_heads, head_dim] of the pool's dtype; rows as slot_rows gives them, without repeats."""
    _, _, _, num_kv_heads, block_size, head_dim = pool.shape
    flat = pool.view(-1, head_dim)
    per_kind = num_kv_heads * block_size
    first = rows + layer * 2 * per_kind
    flat.index_copy_(0, first, key.reshape(-1, head_dim))
    flat.index_copy_(0, first + per_kind, value.reshape(-1, head_dim))

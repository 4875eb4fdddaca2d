"""Pack a token range of a block table into contiguous memory, and unpack it again.

packed [layers, 2, kv_heads, tokens, head_dim]; packed[l, k, h, t] = pool[table[p // size], first_layer + l, k, h, p % size]
with p = first_token + t.

Rows of a block, layer, kind and head are together in the pool; heads lie stride elements apart: see kv_write.

A program copies TOKENS rows of head_dim elements of one layer, kind and head: contiguous on the packed side, and in runs of
a block's tokens on the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from baton_kernels.kv_write import head_stride

TOKENS = 64


@triton.jit(do_not_specialize=["first_token", "num_tokens"])
def _copy(
    pool_ptr, packed_ptr, table_ptr, first_token, num_tokens, block_heads, first_head, stride,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr,
    UNPACK: tl.constexpr,
):  # fmt: skip
    """Grid (token tiles, layers * 2 * kv_heads)."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    there = tokens < num_tokens
    dims = tl.arange(0, BLOCK_D)
    inside = there[:, None] & (dims < HEAD_DIM)[None, :]
    at = first_token + tokens
    block = tl.load(table_ptr + at // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    group = block * block_heads + first_head + head
    in_pool = pool_ptr + (group * stride + at % BLOCK_SIZE * HEAD_DIM)[:, None] + dims[None, :]
    in_packed = (
        packed_ptr + (head.to(tl.int64) * num_tokens + tokens)[:, None] * HEAD_DIM + dims[None, :]
    )
    if UNPACK:
        tl.store(in_pool, tl.load(in_packed, mask=inside), mask=inside)
    else:
        tl.store(in_packed, tl.load(in_pool, mask=inside), mask=inside)


def kv_pack(
    pool: torch.Tensor,
    block_ids: Sequence[int] | torch.Tensor,
    first_token: int,
    first_layer: int,
    packed: torch.Tensor,
) -> None:
    """See the twin. `packed` may be on another device: then it is filled by one copy. block_ids may be an int32 tensor there
    already."""
    if packed.device == pool.device and packed.is_contiguous():
        _launch(pool, block_ids, first_token, first_layer, packed, is_unpack=False)
        return
    staging = torch.empty(packed.shape, dtype=packed.dtype, device=pool.device)
    _launch(pool, block_ids, first_token, first_layer, staging, is_unpack=False)
    packed.copy_(staging)


def kv_unpack(
    pool: torch.Tensor,
    block_ids: Sequence[int] | torch.Tensor,
    first_token: int,
    first_layer: int,
    packed: torch.Tensor,
) -> None:
    """See the twin. `packed` may be on another device: then it comes over in one copy."""
    there = packed.to(pool.device).contiguous()
    _launch(pool, block_ids, first_token, first_layer, there, is_unpack=True)


def _launch(
    pool: torch.Tensor,
    block_ids: Sequence[int] | torch.Tensor,
    first_token: int,
    first_layer: int,
    packed: torch.Tensor,
    *,
    is_unpack: bool,
) -> None:
    if packed.dtype != pool.dtype:
        raise ValueError(f"packed {packed.dtype}, pool {pool.dtype}")
    _, num_layers, _, num_kv_heads, block_size, head_dim = pool.shape
    num_tokens = packed.shape[3]
    layer_heads = 2 * num_kv_heads
    table = torch.as_tensor(block_ids, dtype=torch.int32, device=pool.device)
    _copy[(triton.cdiv(num_tokens, TOKENS), packed.shape[0] * 2 * num_kv_heads)](
        pool, packed, table, first_token, num_tokens,
        num_layers * layer_heads, first_layer * layer_heads, head_stride(pool),
        BLOCK_SIZE=block_size, HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim),
        TOKENS=TOKENS, UNPACK=is_unpack, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
